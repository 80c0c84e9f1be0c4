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
    pub said: String,
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
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let said = lines.find_map(|line| line.split_once("PEER ").map(|(_, said)| said.to_owned()));
        Other { child, said: said.unwrap() }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Where the memory of a peer that is an agent lies.
    pub fn base(&self) -> u64 {
        self.said.split_once(' ').unwrap().0.parse().unwrap()
    }

    pub fn metadata(&self) -> Vec<u8> {
        from_words(self.said.split_once(' ').unwrap().1)
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

/// Tells whoever has started this process what to know of it.
pub fn say(what: impl std::fmt::Display) {
    println!("PEER {what}");
    std::io::stdout().flush().unwrap();
}

/// Says who this process is.
pub fn introduce(end: &super::End) {
    say(format_args!("{} {}", end.registration.base(), to_words(&end.agent.metadata())));
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
