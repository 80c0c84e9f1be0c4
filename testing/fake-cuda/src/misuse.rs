//! What a program did that it must not do.

use std::collections::BTreeMap;

/// Kinds of misuse that are kept in words at most; all are counted.
const TOLD_MAX: usize = 256;

/// Misuse so far.
#[derive(Default)]
pub struct Misuse {
    pub count: u64,
    told: BTreeMap<String, u64>,
}

impl Misuse {
    /// Counts `what`, and prints it the first time.
    pub fn report(&mut self, what: String) {
        self.count += 1;
        if let Some(times) = self.told.get_mut(&what) {
            *times += 1;
        } else if self.told.len() < TOLD_MAX {
            eprintln!("fake-cuda: misuse: {what}");
            self.told.insert(what, 1);
        }
    }

    /// One line for each kind.
    pub fn text(&self) -> String {
        self.told.iter().map(|(what, times)| format!("{times} x {what}\n")).collect()
    }
}
