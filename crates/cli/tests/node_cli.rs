//! `forebay node` as its users and systemd run it: it says when clients may come, ends in order or
//! at once as it is told, and refuses a configuration that is not allowed with what is.
#![allow(clippy::unwrap_used)]

use forebay_client::{Client, ClientOptions};
use forebay_kv::ChunkId;
use forebay_store::StoreEnd;
use forebay_transfer::HostLink;
use forebay_transfer::{Class, HostBuffer, Limits, LinkSpec, MoverThread, PathSpec, Place, Span};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use testkit::eventually;

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
        self.start_as(|_| ())
    }

    /// The same, of a command that is changed before it runs.
    fn start_as(&self, change: impl FnOnce(&mut Command)) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command
            .args(["node", "--config"])
            .arg(self.config())
            .env("NOTIFY_SOCKET", self.folder.path().join("notify.sock"))
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
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
    handle.add_path(PathSpec::direct(device, host, link)).unwrap().unwrap();
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

/// Nobody, for root, whom limits do not bind.
fn as_somebody(site: &Site, command: &mut Command) {
    if rustix::process::geteuid().is_root() {
        for path in [site.folder.path(), &site.folder.path().join("notify.sock")] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        command.uid(65_534).gid(65_534);
    }
}

#[test]
fn a_node_to_which_the_system_gives_no_more_threads_ends_in_order() {
    let site = Site::new("[metrics]\nlisten = '127.0.0.1:0'\n");
    let mut node = site.start_as(|command| as_somebody(&site, command));
    // The limit may be changed by the same user.
    let mut limit = Command::new("prlimit");
    limit.args(["--nproc=0:0", "--pid", &node.child.id().to_string()]);
    as_somebody(&site, &mut limit);
    let limited = limit.status().unwrap();
    assert!(limited.success(), "{limited}");
    node.signal(Signal::TERM);
    assert_eq!(node.wait().code(), Some(0));
    assert!(node.line().contains("ending") && node.line().contains("ended, 0 leases"));
    assert!(!site.socket().exists(), "the socket goes with it");
}

#[test]
fn a_node_that_ends_leaves_the_socket_of_its_successor() {
    let site = Site::new("");
    let mut first = site.start();
    std::fs::remove_file(site.socket()).unwrap();
    let mut second = site.start();
    first.signal(Signal::TERM);
    assert_eq!(site.told(), "STOPPING=1");
    assert_eq!(first.wait().code(), Some(0));
    let (client, _mover) = client(&site.socket());
    assert_eq!(client.lookup(&[id()]), 1);
    second.signal(Signal::TERM);
    assert_eq!(second.wait().code(), Some(0));
    assert!(!site.socket().exists());
}

fn taking_over(command: &mut Command) {
    command.arg("--take-over");
}

#[test]
fn node_after_node_goes_on_with_what_is_in_memory_and_the_one_before_it_ends() {
    let site = Site::new("");
    let mut node = site.start();
    let (client, _mover) = client(&site.socket());
    for _ in 0..3 {
        let before = client.instance();
        let next = site.start_as(taking_over);
        assert_eq!(node.wait().code(), Some(0));
        assert!(node.line().contains("another node has 1 chunks of this one"));
        eventually("the client has come back", || client.is_connected() && client.instance() != before);
        assert_eq!(client.lookup(&[id()]), 1);
        assert!(site.socket().exists(), "the socket stays");
        node = next;
    }
    node.signal(Signal::TERM);
    assert_eq!(site.told(), "STOPPING=1");
    assert_eq!(node.wait().code(), Some(0));
    assert!(!site.socket().exists(), "it goes with the last one");
}

#[test]
fn a_node_that_may_not_or_cannot_take_over_says_why_and_the_other_one_goes_on() {
    let site = Site::new("");
    let text = std::fs::read_to_string(site.config()).unwrap();
    std::fs::write(site.config(), format!("allow_uids = [65534]\n{text}")).unwrap();
    let _node = site.start();
    let (client, _mover) = client(&site.socket());
    let instance = client.instance();
    if rustix::process::geteuid().is_root() {
        let nobody = |command: &mut Command| as_somebody(&site, command);
        let said = run_bounded_as(&site.config(), |command| {
            taking_over(command);
            nobody(command);
        });
        assert!(said.contains("user 65534 may not take over"), "{said}");
    }
    let other = site.folder.path().join("other.toml");
    std::fs::write(&other, text.replace("8MiB", "16MiB")).unwrap();
    let said = run_bounded_as(&other, taking_over);
    assert!(said.contains("memory.size is 16777216 there and 8388608 here"), "{said}");
    assert_eq!((client.instance(), client.lookup(&[id()])), (instance, 1));
}

#[test]
fn a_node_behind_one_that_is_stopped_says_at_once_who_has_the_socket() {
    let site = Site::new("");
    let first = site.start();
    first.signal(Signal::STOP);
    let pid = first.child.id();
    eventually("it is stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('T')
    });
    // First it is taken for one that answers, then nobody can connect any more.
    let mut waiting = Vec::new();
    for says in ["another node answers on this socket", "accepts no connections"] {
        let ran = run_bounded(&site.config());
        assert!(ran.contains(says), "{ran}");
        assert!(ran.contains(&format!("process {pid} (forebay, stopped)")), "{ran}");
        while let Ok(socket) = connect_at_once(&site.socket()) {
            waiting.push(socket);
        }
    }
}

/// A connection, if it can be had without waiting.
fn connect_at_once(path: &Path) -> rustix::io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// What a node says that has to refuse to start within the limit.
fn run_bounded(config: &Path) -> String {
    run_bounded_as(config, |_| ())
}

/// The same, of a command that is changed before it runs.
fn run_bounded_as(config: &Path, change: impl FnOnce(&mut Command)) -> String {
    let mut forebay = Command::new(env!("CARGO_BIN_EXE_forebay"));
    forebay.args(["node", "--config"]).arg(config).stdout(Stdio::null()).stderr(Stdio::piped());
    change(&mut forebay);
    let mut child = forebay.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it says nothing");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!(status.code(), Some(1));
    String::from_utf8(stderr).unwrap()
}

#[test]
fn a_missing_log_is_told_where_one_is_made_and_refused_where_none_may_be() {
    let ssd = |site: &Site, more: &str| {
        let path = site.folder.path().join("log");
        let mut text = std::fs::read_to_string(site.config()).unwrap();
        text.push_str(&format!("[[ssd]]\npath = {path:?}\nsize = '80MiB'\n{more}"));
        std::fs::write(site.config(), text).unwrap();
        path
    };
    let site = Site::new("");
    let log = ssd(&site, "create = false\n");
    let refused = run_bounded(&site.config());
    assert!(refused.contains("there is no log, and ssd.create is false"), "{refused}");
    assert!(refused.contains("file system that is mounted at /"), "{refused}");
    assert!(!log.exists());

    let site = Site::new("");
    let log = ssd(&site, "");
    let start = |site: &Site| {
        let mut node = site.start_as(|command| {
            command.stderr(Stdio::piped());
        });
        node.signal(Signal::TERM);
        assert_eq!(site.told(), "STOPPING=1");
        assert_eq!(node.wait().code(), Some(0));
        std::io::read_to_string(node.child.stderr.take().unwrap()).unwrap()
    };
    let told = start(&site);
    assert!(log.exists());
    assert!(told.contains("WARN") && told.contains("new, empty log made"), "{told}");
    let told = start(&site);
    assert!(!told.contains("new, empty log made"), "it is there now: {told}");
}

#[test]
fn an_arena_larger_than_the_memory_that_is_left_is_refused_unless_it_is_asked_for() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total_kib = meminfo.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
    let gib = total_kib.div_ceil(1 << 20) + 1;
    // Without address space for it, so that nothing happens to this machine whatever the node does.
    let start = |more: &str| {
        let site = Site::new("");
        let text = format!("socket = {:?}\n[memory]\nsize = '{gib}GiB'\n{more}", site.socket());
        std::fs::write(site.config(), text).unwrap();
        let ran = Command::new("sh")
            .args(["-c", "ulimit -v 2000000; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_forebay")])
            .args(["node", "--config"])
            .arg(site.config())
            .output()
            .unwrap();
        assert_eq!(ran.status.code(), Some(1), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stderr).unwrap()
    };
    let refused = start("");
    assert!(
        refused.contains(&format!("memory.size: an arena of {gib}.0 GiB, staging of 0.0 MiB")),
        "{refused}"
    );
    assert!(refused.contains(" left of ") && refused.contains("memory.overcommit = true"), "{refused}");
    let tried = start("overcommit = true\n");
    assert!(tried.contains("more memory than is left"), "{tried}");
    assert!(tried.contains(&format!("an arena of {} bytes: ", gib << 30)), "the system's answer: {tried}");
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

#[test]
fn a_log_in_json_is_an_object_a_line_and_has_the_configuration_in_effect() {
    let site = Site::new("");
    let mut node = site.start_as(|command| {
        command.args(["--log-format", "json"]).env("FOREBAY_LOG", "info").stderr(Stdio::piped());
    });
    let lines = BufReader::new(node.child.stderr.take().unwrap()).lines();
    let mut lines = lines.map(|line| serde_json::from_str::<serde_json::Value>(&line.unwrap()).unwrap());
    let line = lines.find(|line| line["message"] == "node started").unwrap();
    assert_eq!((&line["level"], &line["target"]), (&"INFO".into(), &"forebay_node::node".into()));
    let config: serde_json::Value = serde_json::from_str(line["config"].as_str().unwrap()).unwrap();
    assert_eq!(config["socket"], site.socket().to_str().unwrap());
    assert_eq!(config["memory"]["size"], "8MiB");
    // What follows from other values is in it too.
    assert_ne!(config["memory"]["largest_chunk"], "0B");
}

/// What a command says of this configuration.
fn said(site: &Site, more: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["node", "--config"])
        .arg(site.config())
        .args(more)
        // Log lines have their time in front, and no two are the same.
        .env("FOREBAY_LOG", "error")
        .output()
        .unwrap();
    let said = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn what_the_check_refuses_the_start_refuses_with_the_same_words() {
    const PEERS: &str = "[peers]\nlisten = '127.0.0.1:7600'\n";
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "x").unwrap();
    std::fs::write(at("bad.toml"), "[[nodes]]\nname = 'a'\naddress = 'localhost:7600'\n").unwrap();
    std::os::unix::fs::symlink(at("nowhere"), at("link")).unwrap();
    for more in [
        format!("{PEERS}[directory]\netcd = ['http://127.0.0.1:2379']\nttl_s = 1\n"),
        format!("{PEERS}[directory]\netcd = ['127.0.0.1:2379']\n"),
        format!("{PEERS}[directory]\netcd = ['https://127.0.0.1:2379']\n"),
        format!("{PEERS}[directory]\nfile = {:?}\n", at("none.toml")),
        format!("{PEERS}[directory]\nfile = {:?}\n", at("bad.toml")),
        "[directory]\netcd = ['http://127.0.0.1:2379']\n".to_owned(),
        format!("{PEERS}advertise = '0.0.0.0:7600'\n"),
        format!("{PEERS}advertise = '127.0.0.1:0'\n"),
        format!("{PEERS}token_file = '/dev/zero'\n"),
        format!("[[ssd]]\npath = {:?}\nsize = '160MiB'\n", at("no/log")),
        format!("[[ssd]]\npath = {:?}\nsize = '160MiB'\n", folder.path()),
        format!("[[ssd]]\npath = {:?}\nsize = '160MiB'\n", at("link")),
        format!("[[ssd]]\npath = {:?}\nsize = 167772161\n", at("log")),
        format!("[[ssd]]\npath = {:?}\nsize = '900TiB'\nsegment_size = '1GiB'\n", at("log")),
        format!("[[ssd]]\npath = {:?}\nsize = '160MiB'\n", at("file")),
        format!("[relays]\nsocket = {:?}\n", at("no/relays.sock")),
        "chunk_size = '1GB'\n".to_owned(),
    ] {
        let site = Site::new(&more);
        let (checked, started) = (said(&site, &["--check-config"]), said(&site, &[]));
        assert!(!checked.0, "{more}");
        // What is left on a disk changes meanwhile.
        let words = |said: &str| said.replace(|letter: char| letter.is_ascii_digit(), "");
        assert_eq!(words(&checked.1), words(&started.1), "{more}");
        assert!(!started.0, "{more}");
    }
    for socket in [at("file"), at("no/node.sock"), at("link")] {
        let site = Site::new("");
        std::fs::write(site.config(), format!("socket = {socket:?}\n[memory]\nsize = '8MiB'\n")).unwrap();
        let (checked, started) = (said(&site, &["--check-config"]), said(&site, &[]));
        assert!(!checked.0 && checked.1.contains("socket is"), "{checked:?}");
        assert_eq!(checked, started);
    }
}

#[test]
fn the_check_prints_what_will_be_used() {
    let (well, shown) = said(&Site::new(""), &["--check-config"]);
    assert!(well && shown.contains("largest_chunk = \"128KiB\"") && !shown.contains("0B"), "{shown}");
}
