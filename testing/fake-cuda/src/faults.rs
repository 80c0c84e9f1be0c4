//! Faults on request.
//!
//! Commands: `fail SYMBOL NTH CODE` (the NTH call from now on gives CODE, once),
//! `refuse SYMBOL CODE` (each call does), `mend` (none of these any more), `stall SYMBOL` (calls do
//! not come back), `resume SYMBOL`, `delay ENGINE US` (before each operation), `freeze ENGINE`,
//! `release ENGINE`, `poison GPU CODE` (the context's error from now on; what waits for it on other
//! GPUs fails as well), `abandon GPU CODE` (the same, but that others go on as if it had ended: the
//! worst that a driver could do), `missing SYMBOL` (cuGetProcAddress does not find it),
//! `p2p off|on`, `p2p copies HOW` and `p2p kernels HOW` (what copies and kernels do with a peer's
//! memory, and give success: `right`, `lost`: nothing, or `zero`: they write zeroes), `mode GPU N`
//! (the compute mode), `version N`, `rates RATES`. An engine is `h2d.0`, `d2h.0`, `p2p.0` or
//! `compute.0`.

use crate::abi::Code;
use crate::driver::{State, signals};
use crate::engine::engine_by_name;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Faults that wait to happen.
#[derive(Default)]
pub struct Faults {
    /// Symbol, calls until it happens, and what the call gives.
    failing: Vec<(String, u64, Code)>,
    missing: HashSet<String>,
    stalled: HashSet<String>,
    /// Symbols of which each call fails.
    refused: HashMap<String, Code>,
    pub p2p_off: bool,
    /// What copies do with a peer's memory, and what kernels do.
    pub peer_copies: Peers,
    pub peer_kernels: Peers,
}

/// What becomes of bytes that go from GPU to GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Peers {
    #[default]
    Right,
    /// Nothing is written.
    Lost,
    /// Zeroes are written.
    Zero,
}

impl Peers {
    fn named(name: &str) -> Option<Peers> {
        match name {
            "right" => Some(Peers::Right),
            "lost" => Some(Peers::Lost),
            "zero" => Some(Peers::Zero),
            _ => None,
        }
    }
}

impl Faults {
    /// Calls that are still to fail.
    pub fn awaited(&self) -> u64 {
        self.failing.len() as u64
    }

    /// What a call of `symbol` gives instead of doing anything.
    pub fn strike(&mut self, symbol: &str) -> Option<Code> {
        let mut struck = self.refused.get(symbol).copied();
        self.failing.retain_mut(|(name, calls, code)| {
            if name != symbol {
                return true;
            }
            *calls -= 1;
            if *calls == 0 {
                struck = Some(*code);
            }
            *calls > 0
        });
        struck
    }

    /// Whether calls of `symbol` do not come back.
    pub fn is_stalled(&self, symbol: &str) -> bool {
        self.stalled.contains(symbol)
    }

    pub fn is_missing(&self, symbol: &str) -> bool {
        self.missing.contains(symbol)
    }
}

impl State {
    /// Carries out commands, separated by `;`.
    pub fn command(&mut self, commands: &str) -> Result<(), String> {
        commands
            .split(';')
            .map(str::trim)
            .filter(|command| !command.is_empty())
            .try_for_each(|one| self.one_command(one))
    }

    fn one_command(&mut self, command: &str) -> Result<(), String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["fail", symbol, nth, code] => {
                let (nth, code) = (positive(nth)?, Code(positive(code)? as i32));
                self.faults.failing.push((symbol.into(), nth, code));
            }
            ["refuse", symbol, code] => {
                self.faults.refused.insert(symbol.into(), Code(positive(code)? as i32));
            }
            ["mend"] => {
                self.faults.failing.clear();
                self.faults.refused.clear();
            }
            ["stall", symbol] => drop(self.faults.stalled.insert(symbol.into())),
            ["resume", symbol] => {
                self.faults.stalled.remove(symbol);
                signals().done.notify_all();
            }
            ["delay", engine, us] => {
                let us = us.parse().map_err(|_| format!("delay {us:?}: want microseconds"))?;
                self.engines[engine_by_name(engine, self.gpus.len())?].delay = Duration::from_micros(us);
            }
            ["freeze", engine] => self.engines[engine_by_name(engine, self.gpus.len())?].frozen = true,
            ["release", engine] => {
                let engine = engine_by_name(engine, self.gpus.len())?;
                self.engines[engine].frozen = false;
                self.wake_engine(engine);
            }
            [how @ ("poison" | "abandon"), gpu, code] => {
                let (given, code) = (gpu, Code(positive(code)? as i32));
                let gpu = given.parse().ok().and_then(|gpu: usize| self.gpus.get_mut(gpu));
                let gpu = gpu.ok_or_else(|| format!("{how} {given:?}: no such GPU"))?;
                (gpu.poison, gpu.is_abandoned) = (Some(code), how == "abandon");
            }
            ["mode", gpu, mode] => {
                let mode = mode.parse().map_err(|_| format!("mode {mode:?}: want a number"))?;
                let found = gpu.parse().ok().and_then(|gpu: usize| self.gpus.get_mut(gpu));
                found.ok_or_else(|| format!("mode {gpu:?}: no such GPU"))?.compute_mode = mode;
            }
            ["missing", symbol] => drop(self.faults.missing.insert(symbol.into())),
            ["p2p", "off"] => self.faults.p2p_off = true,
            ["p2p", "on"] => self.faults.p2p_off = false,
            ["p2p", who @ ("copies" | "kernels"), how] => {
                let peers = Peers::named(how);
                let peers = peers.ok_or_else(|| format!("p2p {who} {how:?}: want right, lost or zero"))?;
                match who {
                    "copies" => self.faults.peer_copies = peers,
                    _ => self.faults.peer_kernels = peers,
                }
            }
            ["version", version] => self.settings.version = positive(version)? as i32,
            ["rates", rates] => self.links.set(rates)?,
            _ => return Err(format!("no such command: {command:?}")),
        }
        Ok(())
    }
}

fn positive(number: &str) -> Result<u64, String> {
    number
        .parse()
        .ok()
        .filter(|&number| number > 0)
        .ok_or_else(|| format!("{number:?} is no positive number"))
}
