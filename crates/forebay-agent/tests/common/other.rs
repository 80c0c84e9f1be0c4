//! A peer in a process of its own, which can be killed and stopped.

use super::{LONG, end_with, on_rails, post, run as done, scattered};
use forebay_agent::{AgentConfig, End, Fabric, Op, Request};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PEER: &str = "FOREBAY_TEST_AGENT_BYTES";
const RAILS: &str = "FOREBAY_TEST_AGENT_RAILS";
pub const BLOCK: u64 = 64 << 10;
pub const BLOCKS: u64 = 1_024;
pub const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// A peer in a process of its own. The test's file has a test `the_other_process`, ignored, that calls [`run`].
pub struct Other {
    child: Child,
    pub metadata: Vec<u8>,
    pub base: u64,
}

impl Other {
    pub fn spawn(bytes: usize, rails: &[Fabric]) -> Other {
        let codes: String = rails.iter().map(|fabric| fabric.code().to_string()).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
            .env(PEER, bytes.to_string())
            .env(RAILS, codes)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = lines.map_while(Result::ok).find_map(|line| {
            let (_, said) = line.split_once("PEER ")?;
            let (base, metadata) = said.split_once(' ')?;
            Some((base.parse().unwrap(), metadata.split(' ').map(|byte| byte.parse().unwrap()).collect()))
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

/// What [`Other`] runs. Ends with its input.
pub fn run() {
    let Ok(bytes) = std::env::var(PEER) else { return };
    let codes = std::env::var(RAILS).unwrap();
    let named = |fabric: &Fabric| codes.contains(&fabric.code().to_string());
    let rails: Vec<_> = Fabric::ALL.into_iter().filter(named).collect();
    let config = AgentConfig { rails: on_rails(&rails), ..AgentConfig::named("other") };
    let other = end_with(config, bytes.parse().unwrap());
    let metadata: Vec<String> = other.agent.metadata().iter().map(u8::to_string).collect();
    println!("PEER {} {}", other.registration.base(), metadata.join(" "));
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

/// A peer in the middle of a request that is posted again and again.
pub fn busy(one: &super::End, op: Op, rails: &[Fabric]) -> (Other, Request) {
    let other = Other::spawn(BYTES, rails);
    one.agent.add_peer(&other.metadata).unwrap();
    let request = scattered(one, "other", other.base, op, BLOCK, BLOCKS);
    assert_eq!(done(&request), End::Done { bytes: BYTES as u64 });
    (other, request)
}

/// Has something happen to the peer while a request is under way, and says what came of that and how long it took.
pub fn while_busy(request: &Request, happen: impl Fn()) -> (End, Duration) {
    for round in 0u64.. {
        let ended = post(request);
        std::thread::sleep(Duration::from_millis(round % 8));
        if ended.try_recv().is_ok() {
            continue;
        }
        happen();
        let since = Instant::now();
        return (ended.recv_timeout(LONG).unwrap(), since.elapsed());
    }
    unreachable!()
}
