//! Links: a physical resource with a bounded window and a measured rate.

use crate::backoff::Backoff;
use crate::lot::{MAX_LOT_BYTES, MIN_LOT_BYTES};
use std::time::Duration;

/// Names a link of a mover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub(crate) u32);

impl LinkId {
    /// Position in the order in which links were added, as in
    /// [`Telemetry::links`](crate::Telemetry::links).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is stated about a link when it is added.
#[derive(Debug, Clone)]
pub struct LinkSpec {
    /// Shown in telemetry and errors.
    pub name: String,
    /// Lots in flight at most. Two or more hide the latency between lots.
    pub window_lots: u32,
    /// Bytes in flight at most; no lot on the link is larger.
    pub window_bytes: u64,
    /// Smallest lot, unless less is left. Larger where lots take time to start and to end.
    pub lot_bytes_min: u64,
    /// Largest lot. Smaller than the window where lots take time to be put on the link.
    pub lot_bytes_max: u64,
    /// Rate to assume until one has been measured; 0 when nothing is known.
    pub rate_hint_bytes_per_s: u64,
    /// How long an operation may take before it counts as lost.
    pub op_timeout_us: u64,
}

/// Operations get this long unless the link's owner knows better.
const DEFAULT_OP_TIMEOUT_US: u64 = 30_000_000;

impl LinkSpec {
    /// A link without a rate hint, with lots of any size that the mover has, whose operations may
    /// take 30 s.
    pub fn new(name: impl Into<String>, window_lots: u32, window_bytes: u64) -> LinkSpec {
        LinkSpec {
            name: name.into(),
            window_lots,
            window_bytes,
            lot_bytes_min: MIN_LOT_BYTES,
            lot_bytes_max: MAX_LOT_BYTES,
            rate_hint_bytes_per_s: 0,
            op_timeout_us: DEFAULT_OP_TIMEOUT_US,
        }
    }
}

/// Lots on a link.
#[derive(Debug, Default)]
pub(crate) struct Load {
    pub lots: u32,
    pub bytes: u64,
    /// Of `bytes`, those of guests: relays for other places.
    guest_bytes: u64,
}

impl Load {
    /// Whether a window has room for a lot of `bytes` beside it. Guests together get one lot's
    /// worth of bytes at most.
    fn leaves_room(&self, window: &LinkSpec, bytes: u64, guest: bool) -> bool {
        let fits = self.lots == 0 || self.bytes.saturating_add(bytes) <= window.window_bytes;
        let welcome = !guest || self.guest_bytes.saturating_add(bytes) <= MAX_LOT_BYTES;
        self.lots < window.window_lots.max(1) && fits && welcome
    }

    fn add(&mut self, bytes: u64, guest: bool) {
        self.lots += 1;
        self.bytes += bytes;
        self.guest_bytes += if guest { bytes } else { 0 };
    }

    fn take_off(&mut self, bytes: u64, guest: bool) {
        self.lots -= 1;
        self.bytes -= bytes;
        self.guest_bytes -= if guest { bytes } else { 0 };
    }
}

/// A link at work: what is in flight on it, and how fast it has been.
#[derive(Debug)]
pub(crate) struct LinkState {
    pub spec: LinkSpec,
    pub down: bool,
    /// What is in flight.
    pub load: Load,
    /// Of that, what was given up and may be in flight for ever.
    lost: Load,
    backoff: Backoff,
    backs_off_until_us: u64,
    rate: RateMeter,
}

/// How long a link is left alone after its first failure in a row, and at most.
const FIRST_BACKOFF: Duration = Duration::from_micros(1_000);
const BACKOFF_MAX: Duration = Duration::from_micros(1_024_000);

impl LinkState {
    pub fn new(spec: LinkSpec) -> LinkState {
        LinkState {
            spec,
            down: false,
            load: Load::default(),
            lost: Load::default(),
            backoff: Backoff::new(FIRST_BACKOFF, BACKOFF_MAX),
            backs_off_until_us: 0,
            rate: RateMeter::default(),
        }
    }

    /// Whether a lot of `bytes` may start now.
    pub fn admits(&self, now_us: u64, bytes: u64, guest: bool) -> bool {
        !self.down && now_us >= self.backs_off_until_us && self.load.leaves_room(&self.spec, bytes, guest)
    }

    /// Whether a lot of any size may start at some time, if nothing that is lost ever completes.
    pub fn is_live(&self, guest: bool) -> bool {
        let largest = self.spec.window_bytes.min(self.spec.lot_bytes_max).min(MAX_LOT_BYTES);
        !self.down && self.lost.leaves_room(&self.spec, largest, guest)
    }

    /// Notes a failure. The link is left alone for a while: one that fails at once would otherwise
    /// pull every lot and fail it.
    pub fn failed(&mut self, now_us: u64) {
        self.backs_off_until_us = now_us + self.backoff.pause().as_micros() as u64;
    }

    /// Forgets failures, and how fast it was before them.
    pub fn reset(&mut self) {
        self.backoff.reset();
        self.backs_off_until_us = 0;
        self.rate = RateMeter::default();
    }

    /// When a back-off ends that has not ended yet.
    pub fn backoff_ends_us(&self, now_us: u64) -> Option<u64> {
        (!self.down && self.backs_off_until_us > now_us).then_some(self.backs_off_until_us)
    }

    pub fn take(&mut self, bytes: u64, guest: bool) {
        self.load.add(bytes, guest);
    }

    /// Gives an operation up, which goes on all the same.
    pub fn lose(&mut self, now_us: u64, bytes: u64, guest: bool) {
        self.lost.add(bytes, guest);
        self.failed(now_us);
    }

    /// An operation has completed, one that was given up or another.
    pub fn give_back(&mut self, bytes: u64, guest: bool, was_lost: bool) {
        self.load.take_off(bytes, guest);
        if was_lost {
            self.lost.take_off(bytes, guest);
        }
    }

    /// Notes bytes that arrived.
    pub fn moved(&mut self, started_us: u64, now_us: u64, bytes: u64) {
        self.backoff.reset();
        self.rate.sample(started_us, now_us, bytes);
    }

    /// Whether the rate comes from a measurement that still counts. A link that was late once would
    /// otherwise be left out for good: it is measured only while it is used.
    pub fn is_measured(&self, now_us: u64) -> bool {
        self.rate.bytes_per_s().is_some() && (self.load.lots > 0 || !self.rate.is_stale(now_us))
    }

    /// Measured rate if it still counts, else the hint, else `None`.
    pub fn rate_bytes_per_s(&self, now_us: u64) -> Option<f64> {
        let hint = self.spec.rate_hint_bytes_per_s;
        let measured = self.rate.bytes_per_s().filter(|_| self.is_measured(now_us));
        measured.or((hint > 0).then_some(hint as f64))
    }

    /// The rate that was measured last, however long ago, else the hint, else 0.
    pub fn last_rate_bytes_per_s(&self) -> f64 {
        self.rate.bytes_per_s().unwrap_or(self.spec.rate_hint_bytes_per_s as f64)
    }
}

/// Decayed bytes over decayed busy time. A ratio of sums, because completions that arrive together
/// would make a mean of ratios meaningless.
#[derive(Debug, Default)]
struct RateMeter {
    bytes: f64,
    busy_us: f64,
    last_completion_us: u64,
}

impl RateMeter {
    /// Weight that a sample keeps when the next one arrives: about the last ten lots count.
    const KEEP: f64 = 0.9;
    /// What came before a pause of this length says nothing of what comes after it.
    const STALE_US: u64 = 1_000_000;

    fn sample(&mut self, started_us: u64, now_us: u64, bytes: u64) {
        if self.is_stale(started_us) {
            *self = RateMeter::default();
        }
        let busy_since_us = started_us.max(self.last_completion_us);
        self.bytes = self.bytes * Self::KEEP + bytes as f64;
        self.busy_us = self.busy_us * Self::KEEP + now_us.saturating_sub(busy_since_us) as f64;
        self.last_completion_us = now_us;
    }

    fn is_stale(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.last_completion_us) > Self::STALE_US
    }

    fn bytes_per_s(&self) -> Option<f64> {
        (self.busy_us > 0.0).then(|| self.bytes / self.busy_us * 1e6)
    }
}
