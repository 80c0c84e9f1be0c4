//! The faults of a worker's system calls: which of them end oddly, and how. The subjects' file
//! layers ask before each call that moves bytes. This file decides.

use crate::power::Power;
use crate::protocol::{Fault, IoFault};
use crate::random::Random;
use forebay_transfer::lock::Mutex;
use std::io;

/// The faults of one worker, shared by everything that does I/O for the store.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<State>,
    power: Power,
}

#[derive(Debug)]
struct State {
    fault: Fault,
    random: Random,
    played: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// As the system ends it.
    Honest,
    /// After that many bytes, above 0.
    Short(usize),
    /// It is not made, and has this result: bytes, or a negated `errno`.
    Instead(i32),
    /// All of it, but a page from or to another place, which this number chooses.
    Misdirected(u64),
}

/// Which entries of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    Request,
    Answer,
}

/// The result of a call that was not made, as the standard library says it.
pub fn instead(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

impl Default for Faults {
    fn default() -> Faults {
        let state = State { fault: Fault::None, random: Random::new(0), played: 0 };
        Faults { state: Mutex::new(state), power: Power::default() }
    }
}

impl Faults {
    pub fn inject(&self, fault: Fault) {
        if let Fault::PowerLoss { after_writes, seed } = fault {
            self.power.fail_after(after_writes, seed);
        }
        let state = &mut *self.state.lock();
        (state.fault, state.random) = (fault, Random::new(1));
    }

    /// How many calls, values and entries did not go as they should have.
    pub fn played(&self) -> u64 {
        self.state.lock().played
    }

    /// The power supply, which sees every write.
    pub fn power(&self) -> &Power {
        &self.power
    }

    /// How a read of `bytes` is to end.
    pub fn read(&self, bytes: usize) -> Ending {
        self.ending(bytes, |reads, _| reads)
    }

    /// How a write of `bytes` is to end. A sync is a write of 0 bytes.
    pub fn write(&self, bytes: usize) -> Ending {
        self.ending(bytes, |_, writes| writes)
    }

    /// Which byte of a value of `bytes` has changed since it was checked, and the bit of it.
    pub fn flip(&self, bytes: usize) -> Option<(usize, u8)> {
        let state = &mut *self.state.lock();
        let Fault::Flip { percent } = state.fault else { return None };
        if bytes == 0 || !state.random.chance(percent) {
            return None;
        }
        state.played += 1;
        Some((state.random.below(bytes as u64) as usize, 1 << state.random.below(8)))
    }

    /// The choices by which an entry of a ring is torn, if it is.
    pub fn torn(&self, entry: Entry) -> Option<Random> {
        let state = &mut *self.state.lock();
        let Fault::Torn { requests, answers, percent } = state.fault else { return None };
        let concerns = if entry == Entry::Request { requests } else { answers };
        if !concerns || !state.random.chance(percent) {
            return None;
        }
        state.played += 1;
        Some(Random::new(state.random.next()))
    }

    fn ending(&self, bytes: usize, concerns: impl FnOnce(bool, bool) -> bool) -> Ending {
        let State { fault, random, played } = &mut *self.state.lock();
        let Fault::Io { kind, reads, writes, percent } = *fault else { return Ending::Honest };
        if !concerns(reads, writes) || !random.chance(percent) {
            return Ending::Honest;
        }
        let ending = match kind {
            IoFault::Short if bytes > 1 => Ending::Short(1 + random.below(bytes as u64 - 1) as usize),
            IoFault::Zero if bytes > 0 => Ending::Instead(0),
            IoFault::Misdirected if bytes > 0 => Ending::Misdirected(random.next()),
            IoFault::Short | IoFault::Zero | IoFault::Misdirected => Ending::Honest,
            IoFault::Eio => Ending::Instead(-libc::EIO),
            IoFault::Enospc => Ending::Instead(-libc::ENOSPC),
            IoFault::Eintr => Ending::Instead(-libc::EINTR),
        };
        *played += u64::from(ending != Ending::Honest);
        ending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faulty(kind: IoFault, percent: u8) -> Faults {
        let faults = Faults::default();
        faults.inject(Fault::Io { kind, reads: true, writes: false, percent });
        faults
    }

    #[test]
    fn only_the_calls_that_are_meant_end_oddly() {
        let faults = faulty(IoFault::Eio, 100);
        assert_eq!((faults.read(8), faults.write(8)), (Ending::Instead(-libc::EIO), Ending::Honest));
        faults.inject(Fault::None);
        assert_eq!(faults.read(8), Ending::Honest);
    }

    #[test]
    fn what_is_played_is_what_was_injected_and_is_counted() {
        let faults = Faults::default();
        assert!(faults.flip(8).is_none() && faults.torn(Entry::Request).is_none());
        faults.inject(Fault::Flip { percent: 100 });
        assert!(faults.flip(8).is_some_and(|(at, bits)| at < 8 && bits.count_ones() == 1));
        faults.inject(Fault::Torn { requests: true, answers: false, percent: 100 });
        assert!(faults.flip(8).is_none() && faults.torn(Entry::Answer).is_none());
        assert!(faults.torn(Entry::Request).is_some());
        assert_eq!(faults.played(), 2);
    }

    #[test]
    fn a_short_call_moves_something_but_not_all() {
        let faults = faulty(IoFault::Short, 100);
        for _ in 0..1_000 {
            assert!(matches!(faults.read(7), Ending::Short(1..7)));
        }
        assert_eq!(faults.read(1), Ending::Honest);
    }

    #[test]
    fn a_storm_leaves_the_share_that_it_says() {
        let faults = faulty(IoFault::Eintr, 90);
        let honest = (0..10_000).filter(|_| faults.read(8) == Ending::Honest).count();
        assert!((900..1_100).contains(&honest), "{honest}");
    }
}
