//! Leases that this agent grants to peers: under one, a peer may read spans of memory that is
//! offered under leases only. A lease ends when its time is over, when it is given back or revoked,
//! or when its holder's last connection ends. `export.rs` and `exports.rs` ask
//! [`LeaseTable::permits`] when an operation begins and [`LeaseTable::is_alive`] before each DATA.
//! Both compare the lease's end with the clock. [`LeaseTable::expire`], which the agent's timer
//! calls, only removes leases whose time is over and calls their `on_end`. Leases of a store, which
//! keep chunks from being evicted, are `forebay-store`'s.

use super::command::PeerRegion;
use crate::timer::{Due, Timer};
use forebay_transfer::LogGate;
use forebay_transfer::lock::RwLock;
use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::sync::Arc;
use thiserror::Error;

/// Leases of one agent at most.
pub const LEASES_MAX: usize = 65_536;
/// Spans of one lease at most.
pub const LEASE_SPANS_MAX: usize = 65_536;

/// Bytes that a lease is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedSpan {
    pub region: PeerRegion,
    /// First byte.
    pub offset: u64,
    pub len: u64,
}

/// Why there is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoLease {
    #[error("{LEASES_MAX} leases live; no more may")]
    TooMany,
    #[error("a lease for {spans} spans; at most {LEASE_SPANS_MAX} may be")]
    TooManySpans { spans: usize },
    #[error("a lease for {len} bytes at {offset} of a region of {region_bytes}")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        len: u64,
        region_bytes: u64,
    },
    #[error("lease {lease} does not live")]
    Ended { lease: u64 },
}

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseEnd {
    /// Given back, or taken back.
    Revoked,
    /// Its time was over.
    Expired,
    /// Its holder has ended, or lost every connection.
    HolderGone,
}

type OnEnd = Box<dyn FnOnce(LeaseEnd) + Send + Sync>;

struct Lease {
    holder: [u8; 16],
    spans: Vec<LeasedSpan>,
    until_us: u64,
    on_end: OnEnd,
}

/// The leases that an agent has granted. Cheap to clone.
#[derive(Clone)]
pub struct LeaseTable {
    shared: Arc<Shared>,
}

struct Shared {
    live: RwLock<Live>,
    /// Numbers leases so that none can be guessed.
    numbers: RandomState,
    timer: Timer,
    /// For the line that says that leases expired.
    expired: LogGate,
}

#[derive(Default)]
struct Live {
    leases: HashMap<u64, Lease>,
    /// When [`LeaseTable::expire`] is called next.
    next_expiry: Option<Due>,
}

impl Default for LeaseTable {
    /// A table without a timer: the ends of leases whose time is over are told when somebody calls
    /// [`expire`](LeaseTable::expire).
    fn default() -> LeaseTable {
        LeaseTable::new(Timer::default())
    }
}

impl LeaseTable {
    /// An empty table. The timer has the ends of leases told whose time is over. They are dead also
    /// before that.
    pub(crate) fn new(timer: Timer) -> LeaseTable {
        let (live, numbers) = (RwLock::default(), RandomState::new());
        LeaseTable { shared: Arc::new(Shared { live, numbers, timer, expired: LogGate::new() }) }
    }

    /// Has [`expire`](LeaseTable::expire) called at this time, unless it is called before.
    fn expire_at(&self, live: &mut Live, at_us: u64) {
        if live.next_expiry.is_some_and(|due| due.at_us <= at_us) {
            return;
        }
        let weak = Arc::downgrade(&self.shared);
        let due = self.shared.timer.at(at_us, move || {
            weak.upgrade().into_iter().for_each(|shared| LeaseTable { shared }.expire());
        });
        if let Some(later) = live.next_expiry.replace(due) {
            self.shared.timer.forget(later);
        }
    }

    /// Grants a lease to the peer with this instance and says its number. `on_end` is called once,
    /// when the lease has ended and nothing more is begun under it, on any thread; it must be quick
    /// and must not use this table.
    pub fn grant(
        &self,
        holder: [u8; 16],
        mut spans: Vec<LeasedSpan>,
        ttl_us: u64,
        on_end: impl FnOnce(LeaseEnd) + Send + Sync + 'static,
    ) -> Result<u64, NoLease> {
        check(&spans)?;
        spans.sort_unstable_by_key(LeasedSpan::order);
        let mut live = self.shared.live.write();
        if live.leases.len() >= LEASES_MAX {
            return Err(NoLease::TooMany);
        }
        // 0 stands for no lease.
        let free = |lease: &u64| *lease != 0 && !live.leases.contains_key(lease);
        let mut numbers = (0u64..).map(|nth| self.shared.numbers.hash_one((nth, self.now_us())));
        let lease = numbers.find(free).unwrap_or(u64::MAX);
        let until_us = self.now_us().saturating_add(ttl_us);
        live.leases.insert(lease, Lease { holder, spans, until_us, on_end: Box::new(on_end) });
        self.expire_at(&mut live, until_us);
        Ok(lease)
    }

    /// Lets a lease of this holder live for `ttl_us` from now.
    pub fn renew(&self, holder: [u8; 16], lease: u64, ttl_us: u64) -> Result<(), NoLease> {
        let now_us = self.now_us();
        let mut live = self.shared.live.write();
        let found = live.leases.get_mut(&lease);
        let found = found.filter(|found| found.holder == holder && found.until_us > now_us);
        found.ok_or(NoLease::Ended { lease })?.until_us = now_us.saturating_add(ttl_us);
        Ok(())
    }

    /// Ends a lease of this holder. Says whether it lived.
    pub fn give_back(&self, holder: [u8; 16], lease: u64) -> bool {
        self.end_one(lease, |found| found.holder == holder)
    }

    /// Ends a lease, whoever's it is. Says whether it lived.
    pub fn revoke(&self, lease: u64) -> bool {
        self.end_one(lease, |_| true)
    }

    /// Ends all leases of a holder.
    pub fn holder_is_gone(&self, holder: [u8; 16]) {
        let mut live = self.shared.live.write();
        let ended: Vec<_> = live.leases.extract_if(|_, lease| lease.holder == holder).collect();
        drop(live);
        ended.into_iter().for_each(|(_, lease)| (lease.on_end)(LeaseEnd::HolderGone));
    }

    /// Ends the leases whose time is over, and has the timer call this when the next one's is.
    pub fn expire(&self) {
        let now_us = self.now_us();
        let mut live = self.shared.live.write();
        // This may be somebody else's call.
        live.next_expiry.take().into_iter().for_each(|due| self.shared.timer.forget(due));
        let ended: Vec<_> = live.leases.extract_if(|_, lease| lease.until_us <= now_us).collect();
        if let Some(next_us) = live.leases.values().map(|lease| lease.until_us).min() {
            self.expire_at(&mut live, next_us);
        }
        drop(live);
        if !ended.is_empty()
            && let Some(repeated) = self.shared.expired.pass()
        {
            tracing::warn!(leases = ended.len(), repeated, "lease expired");
        }
        ended.into_iter().for_each(|(_, lease)| (lease.on_end)(LeaseEnd::Expired));
    }

    pub fn len(&self) -> usize {
        self.shared.live.read().leases.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn end_one(&self, lease: u64, ends: impl FnOnce(&Lease) -> bool) -> bool {
        let ended = match self.shared.live.write().leases.entry(lease) {
            Entry::Occupied(found) if ends(found.get()) => found.remove(),
            _ => return false,
        };
        (ended.on_end)(LeaseEnd::Revoked);
        true
    }

    fn now_us(&self) -> u64 {
        self.shared.timer.now_us()
    }

    fn with<R>(&self, lease: u64, look: impl FnOnce(&Lease) -> R) -> Option<R> {
        let now_us = self.now_us();
        self.shared.live.read().leases.get(&lease).filter(|found| found.until_us > now_us).map(look)
    }

    /// Whether a lease gives the right to use the region now. Asked before each piece of an
    /// operation.
    pub(super) fn is_alive(&self, lease: u64, region: PeerRegion) -> bool {
        let covers = |found: &Lease| {
            let at = found.spans.partition_point(|span| span.order() < (region.key, region.generation, 0));
            found.spans.get(at).is_some_and(|span| span.region == region)
        };
        self.with(lease, covers).unwrap_or(false)
    }

    /// Whether a lease gives the right to these bytes of the region now. Asked for each span when
    /// an operation begins.
    pub(super) fn permits(&self, lease: u64, region: PeerRegion, offset: u64, len: u64) -> bool {
        let covers = |found: &Lease| {
            let after = (region.key, region.generation, offset);
            let at = found.spans.partition_point(|span| span.order() <= after);
            let span = at.checked_sub(1).and_then(|at| found.spans.get(at));
            let end = offset.checked_add(len);
            span.filter(|span| span.region == region)
                .is_some_and(|span| end.is_some_and(|end| end <= span.offset + span.len))
        };
        self.with(lease, covers).unwrap_or(false)
    }
}

impl LeasedSpan {
    fn order(&self) -> (u64, u64, u64) {
        (self.region.key, self.region.generation, self.offset)
    }
}

fn check(spans: &[LeasedSpan]) -> Result<(), NoLease> {
    if spans.len() > LEASE_SPANS_MAX {
        return Err(NoLease::TooManySpans { spans: spans.len() });
    }
    let inside = |span: &LeasedSpan| {
        let end = span.offset.checked_add(span.len).filter(|_| span.len > 0);
        end.is_some_and(|end| end <= span.region.len)
    };
    match spans.iter().find(|span| !inside(span)) {
        None => Ok(()),
        Some(LeasedSpan { region, offset, len }) => {
            Err(NoLease::OutOfBounds { offset: *offset, len: *len, region_bytes: region.len })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_transfer::lock::Mutex;
    use std::time::{Duration, Instant};

    const REGION: PeerRegion = PeerRegion { key: 7, generation: 3, len: 1_000 };
    const OTHER: PeerRegion = PeerRegion { key: 8, generation: 3, len: 1_000 };
    const HOUR_US: u64 = 3_600_000_000;

    fn span(offset: u64, len: u64) -> LeasedSpan {
        LeasedSpan { region: REGION, offset, len }
    }

    fn table() -> (LeaseTable, Arc<Mutex<Vec<LeaseEnd>>>) {
        (LeaseTable::default(), Arc::default())
    }

    fn keep(ends: &Arc<Mutex<Vec<LeaseEnd>>>) -> impl FnOnce(LeaseEnd) + Send + Sync + 'static {
        let ends = Arc::clone(ends);
        move |end| ends.lock().push(end)
    }

    #[test]
    fn a_lease_is_for_its_spans_and_nothing_else() {
        let (table, ends) = table();
        let lease = table.grant([1; 16], vec![span(100, 50), span(0, 10)], HOUR_US, keep(&ends)).unwrap();
        assert!(table.permits(lease, REGION, 100, 50) && table.permits(lease, REGION, 149, 1));
        assert!(table.permits(lease, REGION, 0, 10) && table.is_alive(lease, REGION));
        for (offset, len) in [(99, 2), (100, 51), (10, 1), (5, 6), (150, 1), (u64::MAX, 1)] {
            assert!(!table.permits(lease, REGION, offset, len), "{len} bytes at {offset}");
        }
        assert!(!table.permits(lease, OTHER, 100, 50) && !table.is_alive(lease, OTHER));
        let later = PeerRegion { generation: 4, ..REGION };
        assert!(!table.permits(lease, later, 100, 50) && !table.is_alive(lease, later));
        assert!(!table.is_alive(lease + 1, REGION) && !table.is_alive(0, REGION));
    }

    #[test]
    fn a_lease_ends_once_by_whatever_comes_first() {
        let (table, ends) = table();
        let grant =
            |holder, ttl_us| table.grant([holder; 16], vec![span(0, 10)], ttl_us, keep(&ends)).unwrap();
        let (one, two, three) = (grant(1, HOUR_US), grant(2, HOUR_US), grant(1, 0));
        assert!(!table.is_alive(three, REGION), "its time is over, though nobody has looked");
        assert_eq!(table.renew([1; 16], three, HOUR_US), Err(NoLease::Ended { lease: three }));
        table.expire();
        assert_eq!(*ends.lock(), [LeaseEnd::Expired]);
        assert!(!table.give_back([2; 16], one), "it is another's");
        assert!(table.give_back([1; 16], one) && !table.give_back([1; 16], one));
        table.holder_is_gone([2; 16]);
        assert!(!table.is_alive(one, REGION) && !table.is_alive(two, REGION) && !table.revoke(two));
        assert_eq!(*ends.lock(), [LeaseEnd::Expired, LeaseEnd::Revoked, LeaseEnd::HolderGone]);
        assert!(table.is_empty());
    }

    #[test]
    fn only_its_holder_renews_a_lease() {
        let (table, ends) = table();
        let lease = table.grant([1; 16], vec![span(0, 10)], HOUR_US, keep(&ends)).unwrap();
        assert_eq!(table.renew([1; 16], lease, 2 * HOUR_US), Ok(()));
        table.expire();
        assert!(table.is_alive(lease, REGION));
        assert_eq!(table.renew([2; 16], lease, HOUR_US), Err(NoLease::Ended { lease }));
    }

    #[test]
    fn one_expiry_is_due_and_it_is_that_of_the_next_lease_that_is_over() {
        let timer = Timer::default();
        let table = LeaseTable::new(timer.clone());
        let grant = |ttl_us| table.grant([1; 16], vec![span(0, 10)], ttl_us, |_| ()).unwrap();
        let grant_and_see_due = |ttl_us| {
            let lease = grant(ttl_us);
            let due_us = timer.due_us();
            assert_eq!(due_us.len(), 1);
            (lease, due_us[0])
        };
        let (hour, hour_us) = grant_and_see_due(HOUR_US);
        assert_eq!(grant_and_see_due(2 * HOUR_US).1, hour_us, "a later one is not due before");
        let (soon, soon_us) = grant_and_see_due(HOUR_US / 2);
        assert!(soon_us < hour_us);
        (1..10).rev().for_each(|nth| assert!(grant_and_see_due(nth * 20_000).1 < soon_us));
        table.renew([1; 16], soon, 3 * HOUR_US).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        table.expire();
        assert_eq!((table.len(), timer.due_us()), (3, vec![hour_us]));
        assert!(table.is_alive(hour, REGION));
    }

    #[test]
    fn a_lease_ends_as_fast_among_many_as_alone() {
        let (table, ends) = table();
        let grant = |_| table.grant([1; 16], vec![span(0, 10)], HOUR_US, keep(&ends)).unwrap();
        let leases: Vec<u64> = (0..LEASES_MAX).map(grant).collect();
        let since = Instant::now();
        for (nth, lease) in leases.iter().enumerate() {
            assert!(if nth % 2 == 0 { table.give_back([1; 16], *lease) } else { table.revoke(*lease) });
        }
        assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
        assert!(table.is_empty() && ends.lock().len() == LEASES_MAX);
    }

    #[test]
    fn no_lease_reaches_outside_its_region() {
        let (table, ends) = table();
        for (offset, len) in [(0, 0), (0, 1_001), (1_000, 1), (u64::MAX, 2)] {
            let refused = table.grant([1; 16], vec![span(offset, len)], HOUR_US, keep(&ends));
            assert_eq!(refused, Err(NoLease::OutOfBounds { offset, len, region_bytes: 1_000 }));
        }
        let spans = vec![span(0, 1); LEASE_SPANS_MAX + 1];
        let refused = table.grant([1; 16], spans, HOUR_US, keep(&ends));
        assert_eq!(refused, Err(NoLease::TooManySpans { spans: LEASE_SPANS_MAX + 1 }));
    }
}
