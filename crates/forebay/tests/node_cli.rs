//! `forebay node` as its users and systemd run it: it says when clients may come, ends in order or at once as it is told, and
//! refuses a configuration that is not allowed with what is.
#![allow(clippy::unwrap_used)]

use forebay_kv::ChunkId;
use forebay_links::HostLink;
use forebay_mover::{Class, HostBuffer, Limits, LinkSpec, MoverThread, Place, RouteSpec, Span};
use forebay_node::client::{Client, ClientOptions};
use forebay_store::StoreEnd;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);
const CHUNK_BYTES: u64 = 10_000;

/// A folder with a node's configuration, and what systemd would listen on.
struct Site {
    folder: TempDir,
    told: UnixDatagram,
}

/// A node, killed with its owner.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Site {
    fn new(more: &str) -> Site {
        let folder = tempfile::tempdir().unwrap();
        let told = UnixDatagram::bind(folder.path().join("notify.sock")).unwrap();
        told.set_read_timeout(Some(LIMIT)).unwrap();
        let site = Site { folder, told };
        let least = format!("socket = {:?}\n[memory]\nsize = '8MiB'\n{more}", site.socket());
        std::fs::write(site.config(), least).unwrap();
        site
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("node.sock")
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("node.toml")
    }

    fn start(&self) -> Running {
        let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["node", "--config"])
            .arg(self.config())
            .env("NOTIFY_SOCKET", self.folder.path().join("notify.sock"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut running = Running { child, lines };
        let ready = running.line();
        assert!(ready.contains("8388608 bytes behind") && ready.contains("node.sock"), "{ready}");
        assert_eq!(self.told(), "READY=1");
        running
    }

    /// What systemd is told next.
    fn told(&self) -> String {
        let mut bytes = [0; 64];
        let len = self.told.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }
}

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < LIMIT, "the node does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client of the node with a chunk there, and a mover that outlives it.
fn client(socket: &Path) -> (Client, MoverThread) {
    let (host, device) = (Place::Host(0), Place::Device(0));
    let mover = MoverThread::spawn(Limits::default()).unwrap();
    let handle = mover.handle();
    let link =
        handle.add_link(LinkSpec::new("host", 4, 1 << 20), Box::new(HostLink::new(1).unwrap())).unwrap();
    handle.add_route(RouteSpec::direct(device, host, link)).unwrap().unwrap();
    let region = handle.register(device, Arc::new(HostBuffer::new(CHUNK_BYTES as usize))).unwrap();
    let client = Client::connect(&handle, host, ClientOptions::new(socket)).unwrap();
    let (sender, ended) = channel();
    let layers = [vec![Span::new(region, 0, CHUNK_BYTES)]];
    let on_end = move |end| drop(sender.send(end));
    client.store_chunk(id(), None, &layers, Class::WriteBack, on_end).unwrap();
    assert_eq!(ended.recv_timeout(LIMIT), Ok(StoreEnd::Stored { bytes: CHUNK_BYTES }));
    (client, mover)
}

fn id() -> ChunkId {
    ChunkId::from_bytes([7; 32])
}

#[test]
fn a_node_says_when_clients_may_come_and_ends_in_order_when_it_is_told() {
    for signal in [Signal::TERM, Signal::INT] {
        let site = Site::new("");
        let mut node = site.start();
        let (client, _mover) = client(&site.socket());
        assert_eq!(client.lookup(&[id()]), 1);
        node.signal(signal);
        assert_eq!(site.told(), "STOPPING=1");
        assert_eq!(node.wait().code(), Some(0));
        assert!(node.line().contains("ending") && node.line().contains("ended, 0 leases and slots cut off"));
        assert!(!site.socket().exists(), "the socket goes with it");
    }
}

#[test]
fn a_node_to_which_nobody_listens_any_more_ends_in_order() {
    let site = Site::new("");
    let mut node = site.start();
    let (other, _) = std::io::pipe().unwrap();
    node.lines = BufReader::new(OwnedFd::from(other).into());
    node.signal(Signal::TERM);
    assert_eq!(node.wait().code(), Some(0));
    assert!(!site.socket().exists(), "the socket goes with it");
}

#[test]
fn what_is_leased_is_waited_for_and_a_second_signal_ends_the_wait() {
    for is_patient in [true, false] {
        let site = Site::new("[limits]\ndrain_s = 3600\n");
        let mut node = site.start();
        let (client, _mover) = client(&site.socket());
        let lease = client.lease(&[id()], 600_000_000);
        assert_eq!(lease.len(), 1);
        node.signal(Signal::TERM);
        assert!(node.line().contains("ending; what is leased may be read for 3600 s"));
        // Soon, nobody gets anything new.
        let start = Instant::now();
        while !client.lease(&[id()], 1_000_000).is_empty() {
            assert!(start.elapsed() < LIMIT, "still something new");
        }
        assert!(node.child.try_wait().unwrap().is_none() && lease.is_alive(), "it waits");
        if is_patient {
            drop(lease);
            assert_eq!(node.wait().code(), Some(0));
            assert!(node.line().contains("ended, 0 leases"));
        } else {
            node.signal(Signal::TERM);
            assert_eq!(node.wait().code(), Some(1));
        }
    }
}

fn check(config: &Path) -> (Option<i32>, String, String) {
    let forebay = env!("CARGO_BIN_EXE_forebay");
    let command = Command::new(forebay).args(["node", "--check-config", "--config"]).arg(config).output();
    let Output { status, stdout, stderr } = command.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn a_configuration_is_printed_in_full_and_starts_nothing() {
    let site = Site::new("");
    let (code, printed, said) = check(&site.config());
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert!(printed.contains("drain_s = 30") && printed.contains("size = \"8MiB\""), "{printed}");
    assert!(!site.socket().exists());
    std::fs::write(site.config(), &printed).unwrap();
    assert_eq!(check(&site.config()).1, printed, "what is printed is a configuration too");
}

#[test]
fn a_configuration_that_is_not_allowed_is_refused_with_what_is() {
    for (more, says) in [
        ("[limits]\nclients = 0\n", "limits.clients is 0; allowed is 1 to 4096"),
        ("[nonsense]\n", "unknown field `nonsense`, expected one of"),
        ("[peers]\nlisten = '127.0.0.1:0'\ntoken_file = '/nosuch/token'\n", "/nosuch/token: No such file"),
        (
            "[peers]\nlisten = '127.0.0.1:0'\n[[peers.rails]]\nfabric = 'tcp'\ndevices = ['a b']\n",
            "a device of peers.rails is \"a b\"",
        ),
        ("[directory]\n", "the number of directory.file and directory.etcd is 0; allowed is one of them"),
        // A node refuses these too, when it starts.
        ("[peers]\nlisten = '192.0.2.2:7600'\n", "peers.listen is 192.0.2.2:7600; allowed is a loopback"),
        (
            "[peers]\nlisten = '0.0.0.0:7600'\n",
            "peers.listen is 0.0.0.0:7600; allowed is an address that peers can connect to",
        ),
        (
            "[metrics]\nlisten = '127.0.0.1:0'\n[metrics.push]\nendpoint = 'https://a:1'\n",
            "metrics.push.endpoint is \"https://a:1\"; allowed is http://host:port",
        ),
    ] {
        let site = Site::new(more);
        let (code, printed, said) = check(&site.config());
        assert_eq!((code, printed.as_str()), (Some(1), ""), "{more}");
        assert!(said.starts_with("forebay: ") && said.contains(says), "{said}");
    }
    let (code, _, said) = check(Path::new("/nosuch/node.toml"));
    assert_eq!(code, Some(1));
    assert!(said.contains("/nosuch/node.toml: No such file"), "{said}");
}

/// The unit that is shipped.
fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/forebay-node.service");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_unit_runs_commands_that_there_are() {
    let site = Site::new("");
    let config = site.config();
    let unit = unit();
    let commands = unit.lines().filter_map(|line| line.strip_prefix("ExecStart"));
    let mut checked = 0;
    for command in commands.map(|line| line.split_once('=').unwrap().1) {
        let words = command.strip_prefix("/usr/bin/forebay ").unwrap().split(' ');
        let words = words.map(|word| if word.ends_with(".toml") { config.to_str().unwrap() } else { word });
        let words: Vec<&str> = words.filter(|word| *word != "--check-config").collect();
        // Whatever else it is told, this one only looks.
        let mut forebay = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let ran = forebay.args(&words).arg("--check-config").output().unwrap();
        assert!(ran.status.success(), "{command}: {}", String::from_utf8_lossy(&ran.stderr));
        checked += 1;
    }
    assert_eq!(checked, 2, "one before the start, and the start");
}

#[test]
fn systemd_understands_the_unit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forebay-node.service");
    std::fs::write(&path, unit().replace("/usr/bin/forebay", env!("CARGO_BIN_EXE_forebay"))).unwrap();
    let Ok(ran) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() else {
        testkit::skipped("systemd-analyze is not installed");
        return;
    };
    // It ends well in spite of keys that it does not know.
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success() && !said.contains("forebay-node"), "{said}");
}
