//! How fast a disk reads and writes, alone and beside each other, as measured while it works.
//! Sans-IO: time is an argument. This file knows when reads and writes began and ended, and their
//! bytes.
//!
//! The bytes of a span of time in which a side was busy make one measurement. A span without the
//! other side counts as alone; one that the other side shared for half of the time or more counts
//! as beside; any other says nothing.

/// The side of the disk that an operation is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Read,
    Write,
}

/// How much a new measurement counts against what was known.
const GAIN: f64 = 0.2;
/// A span ends when its side has nothing under way, or at the next end after this time.
const SPAN_US: u64 = 100_000;
/// Shorter spans say more about latency than about the rate.
const SPAN_BYTES_MIN: u64 = 256 << 10;

#[derive(Debug, Clone, Default)]
pub struct Rates {
    read: Busy,
    write: Busy,
    /// Up to when the time that both sides shared is counted.
    counted_to_us: u64,
}

/// One side: its span, and bytes per microsecond as far as known.
#[derive(Debug, Clone, Default)]
struct Busy {
    under_way: u32,
    since_us: u64,
    shared_us: u64,
    bytes: u64,
    alone: Option<f64>,
    beside: Option<f64>,
}

impl Rates {
    pub fn began(&mut self, now_us: u64, side: Side) {
        self.count_shared(now_us);
        let busy = self.side(side);
        if busy.under_way == 0 {
            busy.start_span(now_us);
        }
        busy.under_way += 1;
    }

    /// An operation that began has ended. `bytes` is 0 if it failed.
    pub fn ended(&mut self, now_us: u64, side: Side, bytes: u64) {
        self.count_shared(now_us);
        let busy = self.side(side);
        busy.under_way = busy.under_way.saturating_sub(1);
        busy.bytes += bytes;
        if busy.under_way == 0 || now_us.saturating_sub(busy.since_us) >= SPAN_US {
            busy.end_span(now_us);
        }
    }

    pub fn under_way(&self, side: Side) -> u32 {
        match side {
            Side::Read => self.read.under_way,
            Side::Write => self.write.under_way,
        }
    }

    /// How long it takes to write so many bytes with nothing beside them. No time as long as that
    /// was never measured.
    pub fn write_us(&self, bytes: u64) -> u64 {
        self.write.alone.map_or(0, |bytes_per_us| (bytes as f64 / bytes_per_us) as u64)
    }

    /// The part of their rate that reads keep beside writes. `None` as long as it was never
    /// measured.
    pub fn reads_keep(&self) -> Option<f64> {
        Some(self.read.beside? / self.read.alone?)
    }

    fn side(&mut self, side: Side) -> &mut Busy {
        match side {
            Side::Read => &mut self.read,
            Side::Write => &mut self.write,
        }
    }

    fn count_shared(&mut self, now_us: u64) {
        let passed_us = now_us.saturating_sub(self.counted_to_us);
        self.counted_to_us = self.counted_to_us.max(now_us);
        if self.read.under_way > 0 && self.write.under_way > 0 {
            self.read.shared_us += passed_us;
            self.write.shared_us += passed_us;
        }
    }
}

impl Busy {
    fn start_span(&mut self, now_us: u64) {
        (self.since_us, self.shared_us, self.bytes) = (now_us, 0, 0);
    }

    fn end_span(&mut self, now_us: u64) {
        let us = now_us.saturating_sub(self.since_us);
        if us > 0 && self.bytes >= SPAN_BYTES_MIN {
            let rate = self.bytes as f64 / us as f64;
            if self.shared_us == 0 {
                learn(&mut self.alone, rate);
            } else if self.shared_us * 2 >= us {
                learn(&mut self.beside, rate);
            }
        }
        self.start_span(now_us);
    }
}

fn learn(known: &mut Option<f64>, measured: f64) {
    *known = Some(known.map_or(measured, |known| known + GAIN * (measured - known)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    #[test]
    fn a_rate_is_that_of_all_operations_of_a_span_together() {
        let mut rates = Rates::default();
        rates.began(0, Side::Write);
        rates.began(500, Side::Write);
        rates.ended(900, Side::Write, MB);
        rates.ended(1_000, Side::Write, MB);
        assert_eq!(rates.write_us(2 * MB), 1_000);
    }

    #[test]
    fn what_reads_keep_beside_writes_is_told_apart_from_reads_alone() {
        let mut rates = Rates::default();
        rates.began(0, Side::Read);
        rates.ended(1_000, Side::Read, 2 * MB);
        assert_eq!(rates.reads_keep(), None);
        rates.began(2_000, Side::Write);
        rates.began(2_000, Side::Read);
        rates.ended(4_000, Side::Read, 2 * MB);
        assert_eq!(rates.reads_keep(), Some(0.5));
    }

    #[test]
    fn a_span_that_was_shared_for_a_moment_says_nothing() {
        let mut rates = Rates::default();
        rates.began(0, Side::Read);
        rates.ended(1_000, Side::Read, MB);
        rates.began(2_000, Side::Read);
        rates.began(2_900, Side::Write);
        rates.ended(3_000, Side::Read, MB);
        rates.ended(10_000, Side::Write, MB);
        assert_eq!((rates.reads_keep(), rates.write_us(MB)), (None, 0));
    }

    #[test]
    fn a_side_that_is_never_idle_is_measured_all_the_same() {
        let mut rates = Rates::default();
        rates.began(0, Side::Write);
        for end in 1..=SPAN_US / 1_000 {
            rates.began(end * 1_000, Side::Write);
            rates.ended(end * 1_000, Side::Write, MB);
        }
        assert_eq!(rates.write_us(MB), 1_000);
    }
}
