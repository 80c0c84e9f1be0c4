//! Vector clocks: how far each stream had come when something happened.

use std::collections::BTreeMap;

/// For each stream the number of its last operation that lies before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(BTreeMap<usize, u64>);

impl Clock {
    /// Makes this clock later than `other`, too.
    pub fn join(&mut self, other: &Clock) {
        for (&stream, &number) in &other.0 {
            self.reach(stream, number);
        }
    }

    /// Operation `number` of `stream` lies before.
    pub fn reach(&mut self, stream: usize, number: u64) {
        let reached = self.0.entry(stream).or_default();
        *reached = number.max(*reached);
    }

    /// Whether operation `number` of `stream` lies before.
    pub fn has(&self, stream: usize, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|&reached| reached >= number)
    }
}
