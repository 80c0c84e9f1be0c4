//! Directories in a real etcd: members see each other, the dead disappear, and nothing that etcd
//! does to its history or to itself leaves a wrong picture. Skipped, loudly, where etcd is not
//! installed.

#![allow(clippy::unwrap_used)]

#[path = "peers/etcd.rs"]
#[allow(dead_code)]
mod addresses;

use forebay_kv::ChunkId;
use forebay_node::directory::{Directory, EtcdConfig, EtcdDirectory, Holders, NodeRecord};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use testkit::eventually;

const LIMIT: Duration = Duration::from_secs(60);
/// What the test that is killed is told by.
const VICTIM: &str = "FOREBAY_TEST_ETCD_VICTIM";

/// An etcd of our own on an address of its own.
struct Etcd {
    process: Option<Child>,
    folder: tempfile::TempDir,
    url: String,
    peer_url: String,
}

impl Etcd {
    /// None, said loudly, where there is no etcd.
    fn installed() -> bool {
        let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
        if !found {
            testkit::skipped("etcd is not installed (Debian: apt-get install etcd-server)");
        }
        found
    }

    fn prepared() -> Etcd {
        let [url, peer_url] = addresses::urls();
        Etcd { process: None, folder: tempfile::tempdir().unwrap(), url, peer_url }
    }

    fn started() -> Etcd {
        let mut etcd = Etcd::prepared();
        etcd.start();
        etcd
    }

    fn start(&mut self) {
        let process = Command::new("etcd")
            .args(["--data-dir".as_ref(), self.folder.path().join("data").as_os_str()])
            .args(["--listen-client-urls", &self.url, "--advertise-client-urls", &self.url])
            .args(["--listen-peer-urls", &self.peer_url, "--initial-advertise-peer-urls", &self.peer_url])
            .args(["--initial-cluster", &format!("default={}", self.peer_url)])
            .args(["--unsafe-no-fsync", "--log-level", "error"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let url = format!("{}/v3/kv/range", self.url);
        eventually("etcd", || post(&url, r#"{"key":"YQ=="}"#).is_some());
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    fn lose_data(&self) {
        std::fs::remove_dir_all(self.folder.path().join("data")).unwrap();
    }

    fn config(&self) -> EtcdConfig {
        EtcdConfig { endpoints: vec![self.url.clone()], ttl_s: 10, ..EtcdConfig::default() }
    }

    fn post(&self, path: &str, body: &str) -> String {
        post(&format!("{}{path}", self.url), body).unwrap()
    }

    fn put(&self, key: &str, value: &str) {
        let [key, value] = [key, value].map(base64);
        self.post("/v3/kv/put", &format!(r#"{{"key":"{key}","value":"{value}"}}"#));
    }

    /// The present revision.
    fn revision(&self) -> u64 {
        let answer = self.post("/v3/kv/range", r#"{"key":"YQ=="}"#);
        let digits = answer.split(r#""revision":""#).nth(1).unwrap();
        digits.split('"').next().unwrap().parse().unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn base64(text: &str) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// One exchange on a connection of its own.
fn post(url: &str, body: &str) -> Option<String> {
    use std::io::{Read, Write};
    let (authority, path) = url.strip_prefix("http://")?.split_once('/')?;
    let mut stream = std::net::TcpStream::connect(authority).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    let head = format!("POST /{path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.starts_with("HTTP/1.1 200").then_some(answer)
}

fn record(node: u8) -> NodeRecord {
    let address = format!("127.0.0.1:{}", 7000 + u16::from(node)).parse().unwrap();
    NodeRecord { node: [node; 16], instance: [node + 100; 16], name: format!("node {node}"), address }
}

fn join(config: &EtcdConfig, node: u8) -> EtcdDirectory {
    EtcdDirectory::start(config, record(node)).unwrap()
}

fn ids(numbers: std::ops::Range<u32>) -> Vec<ChunkId> {
    let id = |number: u32| {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        ChunkId::from_bytes(bytes)
    };
    numbers.map(id).collect()
}

/// Whether exactly the first `held` of the chunks are said to be at `node`, and the others nowhere.
fn sees(directory: &EtcdDirectory, chunks: &[ChunkId], held: usize, node: u8) -> bool {
    let Holders::Said(holders) = directory.holders(chunks) else { return false };
    let (there, nowhere) = holders.split_at(held);
    there.iter().all(|nodes| nodes == &[[node; 16]]) && nowhere.iter().all(Vec::is_empty)
}

#[test]
fn two_nodes_see_each_others_chunks_and_a_goodbye_at_once() {
    if !Etcd::installed() {
        return;
    }
    let etcd = Etcd::started();
    let config = EtcdConfig { ttl_s: 3600, ..etcd.config() };
    let (one, two) = (join(&config, 1), join(&config, 2));
    let chunks = ids(0..1000);
    one.announce(&chunks, &[]);
    eventually("the chunks of one", || sees(&two, &chunks, 1000, 1));
    assert_eq!(two.nodes(), [record(1)]);
    one.announce(&[], &chunks[300..]);
    eventually("the removals", || sees(&two, &chunks, 300, 1));
    assert!(sees(&one, &chunks, 0, 1), "nobody is told of itself");
    eventually("all answers", || one.stat().waiting == 0);
    let stat = one.stat();
    assert_eq!((stat.announced, stat.stale_us, stat.faults.refused), (300, None, 0));
    drop(one);
    eventually("the goodbye", || two.nodes().is_empty() && two.stat().holdings == 0);
}

/// Not a test by itself: the process that [`a_killed_node_disappears_with_its_chunks`] kills.
#[test]
fn victim() {
    let Ok(url) = std::env::var(VICTIM) else { return };
    let config = EtcdConfig { endpoints: vec![url], ttl_s: 2, ..EtcdConfig::default() };
    let directory = join(&config, 9);
    directory.announce(&ids(0..10), &[]);
    std::thread::sleep(2 * LIMIT);
}

#[test]
fn a_killed_node_disappears_with_its_chunks() {
    if !Etcd::installed() {
        return;
    }
    let etcd = Etcd::started();
    let watcher = join(&etcd.config(), 1);
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["victim", "--exact"])
        .env(VICTIM, &etcd.url)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the victim", || sees(&watcher, &ids(0..10), 10, 9));
    victim.kill().unwrap();
    victim.wait().unwrap();
    eventually("its end", || watcher.nodes().is_empty() && watcher.stat().holdings == 0);
}

#[test]
fn a_node_that_starts_again_at_once_is_not_said_to_hold_what_it_held() {
    if !Etcd::installed() {
        return;
    }
    let etcd = Etcd::started();
    // Its lease would live for an hour.
    let config = EtcdConfig { ttl_s: 3600, ..etcd.config() };
    let watcher = join(&config, 1);
    let before = join(&config, 2);
    before.announce(&ids(0..5), &[]);
    eventually("what it holds", || sees(&watcher, &ids(0..5), 5, 2));
    let again = EtcdDirectory::start(&config, NodeRecord { instance: [7; 16], ..record(2) }).unwrap();
    eventually("its new start", || watcher.nodes().first().is_some_and(|record| record.instance == [7; 16]));
    eventually("the end of what it said", || sees(&watcher, &ids(0..5), 0, 2));
    drop((before, again));
}

#[test]
fn compaction_and_a_killed_etcd_leave_a_right_picture() {
    if !Etcd::installed() {
        return;
    }
    let mut etcd = Etcd::started();
    let (one, two) = (join(&etcd.config(), 1), join(&etcd.config(), 2));
    let chunks = ids(0..200);
    one.announce(&chunks[..100], &[]);
    eventually("the first chunks", || sees(&two, &chunks, 100, 1));
    for round in 0..3 {
        etcd.kill();
        eventually("that it is noticed", || two.stat().stale_us.is_some());
        assert_eq!(two.stat().nodes, 1, "what was known is kept");
        one.announce(&chunks[100..], &chunks[..50]);
        etcd.start();
        // Whoever comes back later than this has missed what is not there any more.
        let revision = etcd.revision();
        etcd.post("/v3/kv/compaction", &format!(r#"{{"revision":"{revision}","physical":true}}"#));
        eventually("what was said meanwhile", || sees(&two, &chunks[50..], 150, 1));
        eventually("what was taken back", || sees(&two, &chunks[..50], 0, 1));
        eventually("freshness", || one.stat().stale_us.is_none() && two.stat().stale_us.is_none());
        one.announce(&chunks[..50], &chunks[100..]);
        eventually("the same as before", || sees(&two, &chunks, 100, 1));
        assert_eq!(two.stat().holdings, 100, "in round {round}");
    }
}

#[test]
fn an_etcd_that_lost_its_data_is_told_everything_again() {
    if !Etcd::installed() {
        return;
    }
    let mut etcd = Etcd::started();
    let (one, two) = (join(&etcd.config(), 1), join(&etcd.config(), 2));
    let chunks = ids(0..20);
    one.announce(&chunks[..10], &[]);
    two.announce(&chunks[10..], &[]);
    eventually("the chunks", || sees(&two, &chunks, 10, 1) && sees(&one, &chunks[10..], 10, 2));
    etcd.kill();
    etcd.lose_data();
    etcd.start();
    eventually("two joins each", || one.stat().joins >= 2 && two.stat().joins >= 2);
    eventually("the chunks", || sees(&two, &chunks, 10, 1) && sees(&one, &chunks[10..], 10, 2));
}

#[test]
fn etcd_may_come_when_it_comes() {
    if !Etcd::installed() {
        return;
    }
    let mut etcd = Etcd::prepared();
    let start = Instant::now();
    let (one, two) = (join(&etcd.config(), 1), join(&etcd.config(), 2));
    let chunks = ids(0..50);
    one.announce(&chunks, &[]);
    assert_eq!(two.holders(&chunks), Holders::Unknown);
    assert!(two.nodes().is_empty());
    assert!(start.elapsed() < Duration::from_secs(20), "nobody waits for etcd");
    eventually("faults", || one.stat().faults.unreachable > 2);
    assert!(one.stat().stale_us.is_some());
    etcd.start();
    eventually("the chunks", || sees(&two, &chunks, 50, 1));
}

#[test]
fn a_lie_is_just_an_answer_and_garbage_is_none() {
    if !Etcd::installed() {
        return;
    }
    let etcd = Etcd::started();
    let one = join(&etcd.config(), 1);
    let chunks = ids(0..2);
    let (liar, lie) = ("02".repeat(16), chunks[0]);
    etcd.put(&format!("/forebay/chunks/{lie}/{liar}"), "");
    etcd.put(&format!("/forebay/nodes/{}", "03".repeat(16)), "garbage");
    etcd.put("/forebay/chunks/what", &"x".repeat(100_000));
    etcd.put(&format!("/forebay/nodes/{liar}"), &record(2).to_json());
    eventually("the lie", || sees(&one, &chunks, 1, 2));
    // They are read again when the directory is.
    eventually("the count of garbage", || one.stat().faults.bad_entries >= 2);
    assert_eq!(one.nodes(), [record(2)]);
}

#[test]
fn a_frozen_etcd_is_noticed_and_costs_nobody_time() {
    if !Etcd::installed() {
        return;
    }
    let etcd = Etcd::started();
    let config = EtcdConfig { request_limit_us: 500_000, ..etcd.config() };
    let one = join(&config, 1);
    eventually("the start", || one.stat().stale_us.is_none());
    let process = etcd.process.as_ref().unwrap().id();
    signal(process, "STOP");
    eventually("that it is noticed", || one.stat().stale_us.is_some());
    let start = Instant::now();
    one.announce(&ids(0..100), &[]);
    let _ = (one.nodes(), one.holders(&ids(0..100)));
    assert!(start.elapsed() < Duration::from_secs(20));
    signal(process, "CONT");
    eventually("that it goes on", || one.stat().stale_us.is_none() && one.stat().announced == 100);
}

fn signal(process: u32, name: &str) {
    let killed = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
    assert!(killed.unwrap().success());
}
