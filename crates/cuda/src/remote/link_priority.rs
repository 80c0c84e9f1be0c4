//! Who goes first on a GPU's PCIe link: the engine that the GPU is. While that copies itself, what
//! others ask of the PCIe link waits, but for one request now and then, so that nobody waits for
//! ever.

use super::wire::Uuid;
use crate::links::Direction;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Between two requests of others on a PCIe link whose own engine copies. A lot is 2 MiB at most,
/// so that others get 1 GB/s, which is 2 % of a PCIe 5 link; and a lot that was asked for in vain
/// is late by a few of these.
pub const HOLD: Duration = Duration::from_millis(2);

/// The PCIe links of all GPUs.
#[derive(Debug, Default)]
pub struct LinkPriority {
    /// PCIe links whose own engines copy now.
    taken: Vec<(Uuid, Direction)>,
    /// When a request of others was last started on a PCIe link that was taken.
    last: HashMap<(Uuid, Direction), Instant>,
}

impl LinkPriority {
    /// Begins a round of looking at who copies.
    pub fn forget(&mut self) {
        self.taken.clear();
    }

    /// Notes that the engine of a GPU copies.
    pub fn note(&mut self, gpu: Uuid, direction: Direction) {
        self.taken.push((gpu, direction));
    }

    /// Whether a request of another engine may start on a GPU's PCIe link now. If so it counts as
    /// started.
    pub fn lets_start(&mut self, gpu: Uuid, direction: Direction, now: impl FnOnce() -> Instant) -> bool {
        let link = (gpu, direction);
        if !self.taken.contains(&link) {
            return true;
        }
        let now = now();
        let is_due = self.last.get(&link).is_none_or(|last| now.saturating_duration_since(*last) >= HOLD);
        if is_due {
            self.last.insert(link, now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Hex;
    use super::*;

    const GPU: Uuid = Hex([7; 16]);
    const THERE: Direction = Direction::HostToDevice;

    #[test]
    fn others_wait_while_the_links_own_engine_copies_and_only_then() {
        let (mut link_priority, now) = (LinkPriority::default(), Instant::now());
        link_priority.note(GPU, THERE);
        assert!(link_priority.lets_start(GPU, THERE, || now), "the first one need not wait");
        assert!(!link_priority.lets_start(GPU, THERE, || now));
        assert!(
            link_priority.lets_start(GPU, Direction::DeviceToHost, || now),
            "the other direction is free"
        );
        assert!(link_priority.lets_start(Hex([8; 16]), THERE, || now), "and so is another GPU");
        link_priority.forget();
        assert!((0..9).all(|_| link_priority.lets_start(GPU, THERE, || now)));
    }

    #[test]
    fn nobody_waits_for_ever() {
        let (mut link_priority, begun) = (LinkPriority::default(), Instant::now());
        link_priority.note(GPU, THERE);
        let started = (0..100)
            .filter(|tenth| link_priority.lets_start(GPU, THERE, || begun + HOLD * *tenth / 10))
            .count();
        assert_eq!(started, 10, "one in each HOLD");
    }
}
