//! What goes wrong on request: which commands are slow, out of order, failed, lost or told twice.
//! The same faults with the same seed are the same run.

use super::status::Status;

/// Faults of I/O commands. The default is none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub seed: u64,
    /// Any command that is due may be the next one to be carried out.
    pub out_of_order: bool,
    /// Each command takes up to this many steps more.
    pub slow_steps: u64,
    /// The last word of a completion, with the phase, follows so many steps after the others.
    pub phase_delay_steps: u64,
    /// Each nth command is not carried out and ends with this status.
    pub status: Option<(u64, Status)>,
    /// Each nth completion is posted twice.
    pub duplicate_every: Option<u64>,
    /// Each nth command is carried out and its completion never posted.
    pub lose_every: Option<u64>,
}

/// Faults under way.
#[derive(Debug)]
pub struct FaultPlan {
    faults: Faults,
    random: u64,
    executed: u64,
}

/// What happens to one command.
#[derive(Debug, Clone, Copy)]
pub struct Fate {
    pub status: Option<Status>,
    /// How often its completion is posted.
    pub completions: usize,
}

impl FaultPlan {
    pub fn new(faults: Faults) -> FaultPlan {
        FaultPlan { faults, random: faults.seed, executed: 0 }
    }

    /// What happens to the next command.
    pub fn fate(&mut self) -> Fate {
        self.executed += 1;
        let is_nth = |every: Option<u64>| every.is_some_and(|every| self.executed.is_multiple_of(every));
        let status = self.faults.status.filter(|(every, _)| is_nth(Some(*every))).map(|(_, status)| status);
        let completions = match (is_nth(self.faults.lose_every), is_nth(self.faults.duplicate_every)) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => 1,
        };
        Fate { status, completions }
    }

    /// How many steps more a command takes.
    pub fn delay(&mut self) -> u64 {
        self.below(self.faults.slow_steps + 1)
    }

    /// Which of so many commands that are due is next.
    pub fn choose(&mut self, due: usize) -> usize {
        if self.faults.out_of_order { self.below(due as u64) as usize } else { 0 }
    }

    pub fn phase_delay(&self) -> u64 {
        self.faults.phase_delay_steps
    }

    /// A number below a bound, by the generator SplitMix64.
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound.max(1)
    }
}
