//! Rails between the two processes: how they are written on the command line, and that they carry
//! the bytes that are measured.

use crate::output::Error;
use forebay_net::{Agent, PeerStat, RailOptions, TCP};
use std::fmt;
use std::time::{Duration, Instant};

/// A transport opens and connects within this time.
const TAKEN_LIMIT: Duration = Duration::from_secs(20);

/// A rail, as written on the command line: `memory`, `tcp=lo`, `rdma=mlx5_0:1,mlx5_1:1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rail(pub RailOptions);

/// Reads a rail.
pub fn rail(text: &str) -> Result<Rail, String> {
    let (fabric, devices) = match text.split_once('=') {
        Some((fabric, devices)) => (fabric, devices.split(',').map(str::to_owned).collect()),
        None => (text, Vec::new()),
    };
    if devices.iter().any(String::is_empty) {
        return Err(format!("'{text}' names an empty device; allowed: tcp=lo, rdma=mlx5_0:1,mlx5_1:1"));
    }
    RailOptions::named(fabric, devices).map(Rail).map_err(|error| error.to_string())
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = &self.0.devices;
        f.write_str(self.0.name())?;
        if devices.is_empty() { Ok(()) } else { write!(f, "={}", devices.join(",")) }
    }
}

/// Waits until a rail of an agent with `rails` of them carries bytes to its only peer; an error
/// says why none does.
pub fn wait_until_taken(agent: &Agent, rails: usize) -> Result<(), Error> {
    let until = Instant::now() + TAKEN_LIMIT;
    loop {
        let peer = only_peer(agent)?;
        if peer.flows.iter().any(|flow| flow.path != TCP) {
            return Ok(());
        }
        if peer.idle_rails.len() == rails {
            let why = |idle: &forebay_net::IdleRail| format!("{}: {}", Rail(idle.rail.clone()), idle.why);
            let whys: Vec<_> = peer.idle_rails.iter().map(why).collect();
            return Err(format!("no rail carries bytes to the other process: {}", whys.join("; ")).into());
        }
        if Instant::now() > until {
            return Err(format!("no rail came about within {TAKEN_LIMIT:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that took TCP so far.
pub fn bytes_over_tcp(agent: &Agent) -> Result<u64, Error> {
    bytes_over(agent, TCP)
}

/// Bytes that took a path so far.
pub fn bytes_over(agent: &Agent, path: &str) -> Result<u64, Error> {
    Ok(only_peer(agent)?.counts.paths.get(path).map_or(0, |path| path.moved_bytes))
}

fn only_peer(agent: &Agent) -> Result<PeerStat, Error> {
    agent.stats().into_iter().next().ok_or_else(|| "the other process is gone".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn rails_are_written_as_they_are_read_and_others_are_refused() {
        for text in ["memory", "tcp=lo", "rdma=mlx5_0:1,mlx5_1:1"] {
            assert_eq!(rail(text).unwrap().to_string(), text);
        }
        for bad in ["", "shm", "Memory", "tcp=", "tcp=lo,", "=lo"] {
            assert!(rail(bad).is_err(), "{bad}");
        }
    }
}
