//! A peer in a process of its own: this test binary again, which does what it is told, a line at a
//! time, with one line of answer each.

use crate::rig::{LONG, Side};
use cuda_testkit::Fake;
use forebay_cuda::driver::Driver;
use forebay_net::{End, Op};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;

/// Its GPU and how many bytes it has. Without it the test that is a peer does nothing.
const ORDER: &str = "FOREBAY_TEST_GPU_PEER";
const MARK: &str = "PEER ";
/// What it is called.
pub const NAME: &str = "other";

/// The peer. Killed when this is dropped.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub base: u64,
    pub metadata: Vec<u8>,
}

impl Peer {
    pub fn spawn(gpu: u16, bytes: usize) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer::a_peer_does_what_it_is_told", "--ignored", "--nocapture"])
            .env(ORDER, format!("{gpu} {bytes}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut peer = Peer { child, input, output, base: 0, metadata: Vec::new() };
        let said = peer.line();
        let (base, metadata) = said.split_once(' ').unwrap();
        (peer.base, peer.metadata) = (base.parse().unwrap(), from_hex(metadata));
        peer
    }

    pub fn at(&self) -> (&'static str, u64) {
        (NAME, self.base)
    }

    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.line()
    }

    /// Has it know this agent.
    pub fn knows(&mut self, side: &Side) {
        let metadata = hex(&side.agent().metadata());
        assert_eq!(self.ask(&format!("knows {metadata}")), "ok");
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the peer has ended");
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// What tells bytes from others.
pub fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, byte| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(*byte))
}

#[test]
#[ignore = "started by other tests"]
fn a_peer_does_what_it_is_told() {
    let Ok(order) = std::env::var(ORDER) else { return };
    let (gpu, bytes) = order.split_once(' ').unwrap();
    let fake = Fake { driver: Driver::load().unwrap() };
    let side = Side::by_ipc(&fake, NAME, gpu.parse().unwrap(), bytes.parse().unwrap());
    println!("{MARK}{} {}", side.registration.base(), hex(&side.agent().metadata()));
    let mut under_way: Option<mpsc::Receiver<End>> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["knows", metadata] => {
                side.agent().add_peer(&from_hex(metadata)).unwrap();
                "ok".into()
            }
            ["fill", seed] => sum(&side.fill(seed.parse().unwrap())).to_string(),
            ["sum"] => sum(&side.bytes()).to_string(),
            ["copies"] => (fake.stat("cuMemcpyBatchAsync") + fake.stat("cuMemcpyAsync")).to_string(),
            ["stat", name] => fake.stat(name).to_string(),
            ["deregister"] => format!("{:?}", side.agent().deregister(side.registration)),
            ["metadata"] => hex(&side.agent().metadata()),
            ["post", op, name, base, block, count] => {
                let op = if op == "read" { Op::Read } else { Op::Write };
                let number = |word: &str| word.parse().unwrap();
                let request = side.request_at(op, (name, number(base)), number(block), number(count));
                under_way = Some(crate::rig::post(&request));
                "ok".into()
            }
            ["wait"] => format!("{:?}", under_way.take().unwrap().recv_timeout(LONG)),
            ["moved", path] => side.moved(path).to_string(),
            _ => {
                fake.control(&line);
                "ok".into()
            }
        };
        println!("{MARK}{answer}");
    }
    // As a killed one: the driver has nothing to say of what is under way.
    std::process::exit(0);
}
