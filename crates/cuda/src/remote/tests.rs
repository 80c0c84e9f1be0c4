//! The node's side against engines that are not what they say: no engine needs a GPU to be refused.

use super::link_priority::HOLD;
use super::ring::{self, Asker, Header, QUEUE_WORDS, RUNS_MAX, Run};
use super::server::ENGINES_MAX;
use super::shared::SharedFile;
use super::socket::{self, Ringer};
use super::wire::{self, Hex, Message, Offer, VERSION};
use super::{Relays, RelaysConfig, RelaysStat};
use crate::driver::Driver;
use crate::gpu::Gpu;
use forebay_transfer::listen::bind_socket;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<&Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let path = fake_cuda_install::installed().libcuda.to_str().unwrap().to_owned();
        let path = std::ffi::CString::new(path).unwrap();
        // SAFETY: the library is the fake driver, which may be loaded anywhere, and is never
        // closed.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null());
            Driver::from_library(libc::dlsym, library).unwrap()
        }
    })
}

pub(super) fn config(folder: &Path) -> RelaysConfig {
    RelaysConfig {
        socket: folder.join("relays.sock"),
        gpus: None,
        token: b"let me in".to_vec(),
        uids: Vec::new(),
        memory_limit_bytes: 1 << 20,
    }
}

fn wait_until(relays: &Relays, wanted: impl Fn(&RelaysStat) -> bool) {
    let begun = Instant::now();
    while !wanted(&relays.stat()) {
        assert!(begun.elapsed() < TIMEOUT, "{:?}", relays.stat());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// An engine that says what it likes.
struct Client {
    socket: OwnedFd,
    ring: SharedFile,
    ringer: Ringer,
    relays: Vec<Offer>,
}

fn hello() -> Message {
    hello_of(0)
}

fn hello_of(gpu: u16) -> Message {
    let gpu = Hex(Gpu::find(driver(), gpu).unwrap().uuid().unwrap());
    Message::Hello { version: VERSION, token: "let me in".into(), gpu }
}

fn say(socket: &OwnedFd, message: &Message, files: &[&SharedFile]) -> Message {
    let files: Vec<_> = files.iter().map(|file| file.file()).collect();
    wire::send(socket, message, &files).unwrap();
    wire::receive(socket).unwrap().0
}

fn reason(answer: Message) -> String {
    match answer {
        Message::Refused { reason } => reason,
        word => panic!("{word:?} where a refusal was expected"),
    }
}

impl Client {
    fn attach(path: &Path) -> Client {
        Client::attach_as(path, 0)
    }

    fn attach_as(path: &Path, gpu: u16) -> Client {
        let socket = socket::connect_to(path).unwrap();
        wire::send(&socket, &hello_of(gpu), &[]).unwrap();
        let (Message::Welcome { relays }, descriptors) = wire::receive(&socket).unwrap() else {
            panic!("not welcome")
        };
        let [ring, bell] = <[OwnedFd; 2]>::try_from(descriptors).unwrap();
        Client {
            socket,
            ring: SharedFile::open(ring, 1 << 30).unwrap(),
            ringer: Ringer::received(bell),
            relays,
        }
    }

    fn give(&self, number: u64, bytes: u64) -> SharedFile {
        let file = SharedFile::create(bytes).unwrap();
        assert_eq!(say(&self.socket, &Message::Memory { memory: number }, &[&file]), Message::Done);
        file
    }

    /// Asks for a copy and waits for the answer.
    fn copy(&self, queue: usize, asker: &mut Asker, run: Run) {
        let words = ring::queue(self.ring.words(), queue);
        let number = asker.ask(words, &[run]).unwrap();
        self.ringer.ring();
        let begun = Instant::now();
        while ring::answer(words, number).is_none() {
            assert!(begun.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
        assert_eq!(ring::answer(words, number), Some(0));
    }

    fn is_parted_from(&self) -> bool {
        socket::wait(&[], &[self.socket.as_fd()], Some(TIMEOUT)).unwrap()[0]
    }
}

#[test]
fn what_an_engine_asks_for_is_copied_both_ways_and_its_going_frees_everything() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let client = Client::attach(relays.socket());
    assert_eq!(client.relays.len(), 3);
    let file = client.give(7, 1 << 20);
    let words = file.words();
    words.iter().take(512).enumerate().for_each(|(nth, word)| word.store(nth as u64, Ordering::Relaxed));
    let run = Run { memory: 7, offset: 0, staging: 8192, bytes: 4096 };
    // The second relay there, and a copy of what is in its other half back: they are not the same
    // bytes.
    client.copy(2, &mut Asker::default(), run);
    client.copy(3, &mut Asker::default(), Run { offset: 4096, ..run });
    assert!(words[512..1024].iter().all(|word| word.load(Ordering::Relaxed) == 0));
    assert_eq!(relays.stat().requests, 2);
    assert!(relays.stat().staging_bytes > 0);
    wire::send(&client.socket, &Message::Bye, &[]).unwrap();
    wait_until(&relays, |stat| (stat.engines, stat.staging_bytes) == (0, 0));
    assert!(Header::of(client.ring.words()).is_quiet());
}

#[test]
fn a_link_whose_own_engine_copies_is_left_to_it_but_for_a_little() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let (owner, attached) = (Client::attach_as(relays.socket(), 0), Client::attach_as(relays.socket(), 1));
    let _file = attached.give(0, 1 << 20);
    let gpu = Hex(Gpu::find(driver(), 0).unwrap().uuid().unwrap());
    let queue = 2 * attached.relays.iter().position(|relay| relay.gpu == gpu).unwrap();
    let run = Run { memory: 0, offset: 0, staging: 0, bytes: 4096 };
    let mut asker = Asker::default();
    let own = Header::of(owner.ring.words());
    own.begin_own(0);
    // The node may have looked who copies just before.
    attached.copy(queue, &mut asker, run);
    let begun = Instant::now();
    (0..8).for_each(|_| attached.copy(queue, &mut asker, run));
    assert!(begun.elapsed() >= 7 * HOLD, "{:?} for 8 requests", begun.elapsed());
    // What it did is over, or it is: then the link is anybody's.
    own.end_own(0);
    attached.copy(queue, &mut asker, run);
    own.begin_own(0);
    wire::send(&owner.socket, &Message::Bye, &[]).unwrap();
    wait_until(&relays, |stat| stat.engines == 1);
    attached.copy(queue, &mut asker, run);
}

#[test]
fn a_request_that_is_taken_back_as_it_is_taken_is_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let client = Client::attach(relays.socket());
    let _file = client.give(0, 1 << 20);
    let words = ring::queue(client.ring.words(), 0);
    let begun = Instant::now();
    let run = Run { memory: 0, offset: 0, staging: 0, bytes: 4096 };
    let mut asker = Asker::default();
    // Each is a small chance to be seen just before it is taken back.
    let mut number = 0;
    while number < 3_000 && begun.elapsed() < Duration::from_secs(5) {
        let since = Instant::now();
        let asked = &words[number as usize % ring::SLOTS as usize * (words.len() / ring::SLOTS as usize)];
        let before = asked.load(Ordering::Relaxed);
        assert_eq!(asker.ask(words, &[run]), Some(number));
        client.ringer.ring();
        let mut flips = 0_u64;
        while ring::answer(words, number).is_none() {
            asked.store(before, Ordering::Release);
            asked.store(number + 1, Ordering::Release);
            flips += 1;
            if flips.is_multiple_of(4096) {
                client.ringer.ring();
                assert!(since.elapsed() < TIMEOUT, "request {number}");
            }
        }
        number += 1;
    }
    assert_eq!(relays.stat().requests, number, "each was started once");
}

#[test]
fn a_socket_whose_node_is_slow_to_let_engines_in_is_not_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let kind = rustix::net::SocketType::SEQPACKET;
    let (_listener, _file) = bind_socket(&config.socket, kind, 0o600).unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        match socket::connect_to(&config.socket) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
    let refused = Relays::start(driver(), config).unwrap_err().to_string();
    assert!(refused.contains("accepts no connections"), "{refused}");
    assert!(folder.path().join("relays.sock").exists());
}

#[test]
fn who_may_not_attach_is_told_why() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let refused = |word: Message| {
        let socket = socket::connect_to(relays.socket()).unwrap();
        reason(say(&socket, &word, &[]))
    };
    let Message::Hello { version, token, gpu } = hello() else { unreachable!() };
    let wrong = Message::Hello { version, token: "let me im".into(), gpu };
    assert_eq!(refused(wrong), "the token is wrong");
    assert_eq!(refused(Message::Hello { version, token: String::new(), gpu }), "the token is wrong");
    assert!(refused(Message::Hello { version: 9, token, gpu }).contains("version 9"));
    assert!(refused(Message::Bye).contains("hello"));
    assert_eq!(relays.stat().refused, 4);
}

#[test]
fn connections_that_say_nothing_keep_no_engine_out() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let silent = || socket::connect_to(relays.socket());
    let _silent: Vec<_> = (0..2 * ENGINES_MAX).map_while(|_| silent().ok()).collect();
    let _engine = Client::attach(relays.socket());
    assert_eq!(relays.stat().engines, 1);
}

#[test]
fn staging_is_bounded_for_all_engines_together() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let path = relays.socket();
    let clients: Vec<_> = (0..3).map(|_| Client::attach(path)).collect();
    let socket = socket::connect_to(path).unwrap();
    let reason = reason(say(&socket, &hello(), &[]));
    assert!(reason.contains("bytes of staging") && reason.contains("left"), "{reason}");
    wire::send(&clients[0].socket, &Message::Bye, &[]).unwrap();
    wait_until(&relays, |stat| stat.engines == 2);
    Client::attach(path);
}

#[test]
fn memory_that_is_too_long_or_could_be_shortened_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let client = Client::attach(relays.socket());
    let give = |number, file: &SharedFile| say(&client.socket, &Message::Memory { memory: number }, &[file]);
    let file = SharedFile::create(1 << 19).unwrap();
    assert_eq!(give(1, &file), Message::Done);
    assert!(reason(give(1, &file)).contains("given before"));
    assert!(reason(give(2, &SharedFile::create(1 << 20).unwrap())).contains("allowed are"));
    assert!(reason(say(&client.socket, &Message::Memory { memory: 3 }, &[])).contains("one file"));
    let unsealed = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4096).unwrap();
    wire::send(&client.socket, &Message::Memory { memory: 4 }, &[unsealed.as_fd()]).unwrap();
    assert!(reason(wire::receive(&client.socket).unwrap().0).contains("sealed"));
    assert_eq!(say(&client.socket, &Message::Forget { memory: 1 }, &[]), Message::Done);
    assert_eq!(give(5, &SharedFile::create(1 << 20).unwrap()), Message::Done);
}

/// What an engine must not ask for beside a good request: runs, and (sequence word, number of
/// runs).
fn nonsense(staging_bytes: u64) -> (Vec<Run>, [(u64, u64); 4]) {
    let good = Run { memory: 0, offset: 0, staging: 0, bytes: 4096 };
    let runs = vec![
        Run { offset: 1 << 20, ..good },
        Run { offset: u64::MAX - 4095, ..good },
        Run { staging: staging_bytes - 4095, ..good },
        Run { bytes: 0, ..good },
        Run { bytes: u64::MAX, ..good },
        Run { memory: 1, ..good },
    ];
    (runs, [(1, 0), (1, RUNS_MAX as u64 + 1), (2, 1), (u64::MAX, 1)])
}

#[test]
fn an_engine_that_writes_nonsense_is_parted_from_and_others_go_on() {
    let good = Run { memory: 0, offset: 0, staging: 0, bytes: 4096 };
    for case in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let relays = Relays::start(driver(), config(folder.path())).unwrap();
        let honest = Client::attach(relays.socket());
        let _file = honest.give(0, 1 << 20);
        let client = Client::attach(relays.socket());
        let _memory = client.give(0, 1 << 20);
        let (runs, words) = nonsense(client.relays[0].staging_bytes().unwrap());
        let queue = ring::queue(client.ring.words(), 1);
        match runs.get(case) {
            Some(run) => assert_eq!(Asker::default().ask(queue, &[good, *run]), Some(0)),
            None => {
                let (sequence, count) = words[case - runs.len()];
                queue[1].store(count, Ordering::Relaxed);
                queue[0].store(sequence, Ordering::Release);
            }
        }
        client.ringer.ring();
        assert!(client.is_parted_from(), "case {case}");
        honest.copy(0, &mut Asker::default(), good);
        wait_until(&relays, |stat| stat.violations == 1);
        let stat = relays.stat();
        assert_eq!(
            (stat.requests, stat.bytes),
            (1, 4096),
            "nothing of a bad request was started, case {case}"
        );
    }
}

#[test]
fn a_ring_full_of_noise_harms_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let relays = Relays::start(driver(), config(folder.path())).unwrap();
    let honest = Client::attach(relays.socket());
    let _file = honest.give(0, 1 << 20);
    let noisy = Client::attach(relays.socket());
    let _memory = noisy.give(0, 1 << 20);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let words = noisy.ring.words();
    let (run, parted) = (Run { memory: 0, offset: 4096, staging: 4096, bytes: 4096 }, AtomicBool::new(false));
    std::thread::scope(|scope| {
        // It keeps the node awake, which so reads what is being written.
        let copying = scope.spawn(|| {
            let mut asker = Asker::default();
            while !parted.load(Ordering::Relaxed) {
                honest.copy(4, &mut asker, run);
            }
            honest.copy(4, &mut asker, run);
        });
        for _ in 0..200_000 {
            let (at, value) = (next() as usize % (words.len() - QUEUE_WORDS), next());
            words[at].store(if value % 3 == 0 { value % 16 } else { value }, Ordering::Relaxed);
        }
        noisy.ringer.ring();
        let is_parted = noisy.is_parted_from();
        parted.store(true, Ordering::Relaxed);
        copying.join().unwrap();
        assert!(is_parted);
    });
}
