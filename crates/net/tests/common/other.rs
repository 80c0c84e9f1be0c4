//! A peer in a process of its own: this test binary, started again to run one of its ignored tests.
#![allow(dead_code, reason = "each test binary uses a part")]

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

/// What the peer is to know. Without it an ignored test that is a peer does nothing.
const ORDER: &str = "FOREBAY_TEST_PEER";

/// The peer, and what it has said of itself. Killed when this is dropped.
pub struct Other {
    child: Child,
    pub metadata: Vec<u8>,
    pub base: u64,
}

impl Other {
    /// Starts the ignored test `role`.
    pub fn spawn(role: &str, order: impl ToString) -> Other {
        Other::spawn_by(Command::new(std::env::current_exe().unwrap()), role, order)
    }

    /// As [`spawn`](Other::spawn), by a command to which the test's arguments are added.
    pub fn spawn_by(mut command: Command, role: &str, order: impl ToString) -> Other {
        let mut child = command
            .args(["--exact", role, "--ignored", "--nocapture"])
            .env(ORDER, order.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.map_while(Result::ok).find_map(|line| {
            let (_, said) = line.split_once("PEER ")?;
            let (base, metadata) = said.split_once(' ')?;
            Some((base.parse().unwrap(), from_words(metadata)))
        });
        let (base, metadata) = said.unwrap();
        Other { child, metadata, base }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What this process is to know, if it is a peer.
pub fn order() -> Option<String> {
    std::env::var(ORDER).ok()
}

/// Says who this process is.
pub fn introduce(end: &super::End) {
    println!("PEER {} {}", end.registration.base(), to_words(&end.agent.metadata()));
    std::io::stdout().flush().unwrap();
}

/// Returns when the process that has started this one has ended, or lets go of it.
pub fn wait_for_the_end() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// Bytes as text for an order.
pub fn to_words(bytes: &[u8]) -> String {
    bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" ")
}

/// What [`to_words`] was given.
pub fn from_words(words: &str) -> Vec<u8> {
    words.split(' ').map(|byte| byte.parse().unwrap()).collect()
}
