//! Commands of tests: `fail SYMBOL NTH CODE` (the NTH call from now on gives CODE, once),
//! `refuse SYMBOL CODE` (each call does), `mend` (none of these any more), `stall SYMBOL` (calls do
//! not come back), `resume SYMBOL`, `delay ENGINE US` (before each operation), `freeze ENGINE`,
//! `release ENGINE`, `poison GPU CODE` (the context's error from now on; what waits for it on other
//! GPUs fails as well), `abandon GPU CODE` (the same, but that others go on as if it had ended: the
//! worst that a driver could do), `missing SYMBOL` (cuGetProcAddress does not find it), `p2p off`,
//! `p2p copies HOW` and `p2p kernels HOW` (what copies and kernels do with a peer's memory, and
//! give success: `right`, `lost`: nothing, or `zero`: they write zeroes), `flaw ENGINE HOW` (what
//! it copies next goes wrong, once, and gives success: `flipped`, a bit of it, or `exchanged`, two
//! ranges of one length), `foreign GPU` (its memory is said to be of another context), `mode GPU N`
//! (the compute mode), `version N`, `rates RATES` (of links from now on, as in `FAKE_CUDA_RATES`).
//! An engine is `h2d.0`, `d2h.0`, `p2p.0` or `compute.0`.

use crate::abi::Code;
use crate::driver::{ENGINES, State, signals};
use crate::faults::{Flaw, Peers};
use std::time::Duration;

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
                let engine = self.engine(engine)?;
                self.engines[engine].delay = Duration::from_micros(us);
            }
            ["freeze", engine] => {
                let engine = self.engine(engine)?;
                self.engines[engine].frozen = true;
            }
            ["release", engine] => {
                let engine = self.engine(engine)?;
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
            ["foreign", gpu] => {
                let found = gpu.parse().ok().filter(|&gpu: &usize| gpu < self.gpus.len());
                self.faults.foreign.insert(found.ok_or_else(|| format!("foreign {gpu:?}: no such GPU"))?);
            }
            ["missing", symbol] => drop(self.faults.missing.insert(symbol.into())),
            ["p2p", "off"] => self.faults.p2p_off = true,
            ["p2p", who @ ("copies" | "kernels"), how] => {
                let peers = match how {
                    "right" => Peers::Right,
                    "lost" => Peers::Lost,
                    "zero" => Peers::Zero,
                    _ => return Err(format!("p2p {who} {how:?}: want right, lost or zero")),
                };
                match who {
                    "copies" => self.faults.peer_copies = peers,
                    _ => self.faults.peer_kernels = peers,
                }
            }
            ["flaw", engine, how] => {
                let flaw = match how {
                    "flipped" => Flaw::Flipped,
                    "exchanged" => Flaw::Exchanged,
                    _ => return Err(format!("flaw {engine} {how:?}: want flipped or exchanged")),
                };
                let engine = self.engine(engine)?;
                self.faults.flaws.insert(engine, flaw);
            }
            ["rates", rates] => self.links.set(rates)?,
            ["version", version] => self.settings.version = positive(version)? as i32,
            _ => return Err(format!("no such command: {command:?}")),
        }
        Ok(())
    }

    /// The engine of a name: `h2d.0`, say.
    fn engine(&self, name: &str) -> Result<usize, String> {
        let gpus = self.gpus.len();
        let found = name.split_once('.').and_then(|(kind, gpu)| {
            let kind = ENGINES.iter().position(|&name| name == kind)?;
            let gpu: usize = gpu.parse().ok().filter(|&gpu| gpu < gpus)?;
            Some(gpu * ENGINES.len() + kind)
        });
        found.ok_or_else(|| {
            format!("no engine {name:?}: want h2d, d2h, p2p or compute, and .GPU below {gpus}")
        })
    }
}

fn positive(number: &str) -> Result<u64, String> {
    number
        .parse()
        .ok()
        .filter(|&number| number > 0)
        .ok_or_else(|| format!("{number:?} is no positive number"))
}
