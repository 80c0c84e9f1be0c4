//! Pins: which chunks of a tier are to stay, for whom and until when, and how much of the tier that
//! may be. Pure: time is an argument. This file knows rows, bytes and times; what a pin keeps from
//! being evicted is the tier's.

use crate::entry::Row;
use crate::tenant::TenantId;
use std::collections::{BTreeSet, HashMap};

/// Longest time that a chunk is pinned for; longer wishes are cut to it.
pub const PIN_US_MAX: u64 = 24 * 3_600 * 1_000_000;
/// A tenant's pins take this part of what it may use at most.
pub const PINNED_OF_QUOTA: u64 = 4;
/// All pins together take this part of the tier at most.
pub const PINNED_OF_TIER: u64 = 2;

/// A chunk that stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pin {
    pub tenant: TenantId,
    pub bytes: u64,
    pub until_us: u64,
}

/// The pins of a tier.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    live: HashMap<Row, Pin>,
    by_end: BTreeSet<(u64, Row)>,
    /// Bytes of each tenant that has pins.
    used: HashMap<TenantId, u64>,
    bytes: u64,
}

impl Pins {
    /// When a pin ends that is wanted for `ttl_us` from now on.
    pub fn end_of(now_us: u64, ttl_us: u64) -> u64 {
        now_us.saturating_add(ttl_us.min(PIN_US_MAX))
    }

    /// Bytes that the tenant may pin beside those that are pinned, where it may use `quota_bytes`
    /// of a tier of `tier_bytes`.
    pub fn room_bytes(&self, tenant: TenantId, quota_bytes: u64, tier_bytes: u64) -> u64 {
        let own_max = quota_bytes.min(tier_bytes) / PINNED_OF_QUOTA;
        let own = own_max.saturating_sub(self.used.get(&tenant).copied().unwrap_or(0));
        own.min((tier_bytes / PINNED_OF_TIER).saturating_sub(self.bytes))
    }

    pub fn until_us(&self, row: Row) -> Option<u64> {
        self.live.get(&row).map(|pin| pin.until_us)
    }

    /// Pins a row, or moves the end of its pin.
    pub fn set(&mut self, row: Row, pin: Pin) {
        self.remove(row);
        self.by_end.insert((pin.until_us, row));
        *self.used.entry(pin.tenant).or_default() += pin.bytes;
        self.bytes += pin.bytes;
        self.live.insert(row, pin);
    }

    /// Ends a pin. Says whether there was one.
    pub fn remove(&mut self, row: Row) -> bool {
        let Some(pin) = self.live.remove(&row) else { return false };
        self.by_end.remove(&(pin.until_us, row));
        self.bytes -= pin.bytes;
        if let Some(used) = self.used.get_mut(&pin.tenant) {
            *used -= pin.bytes;
            if *used == 0 {
                self.used.remove(&pin.tenant);
            }
        }
        true
    }

    /// Ends one pin whose time has come, if there is one.
    pub fn expire(&mut self, now_us: u64) -> Option<Row> {
        let (until_us, row) = *self.by_end.first()?;
        (until_us <= now_us && self.remove(row)).then_some(row)
    }

    /// The pinned rows, of one tenant or of all, the one whose pin ends first first.
    pub fn soonest(&self, tenant: Option<TenantId>) -> impl Iterator<Item = Row> + '_ {
        let is_meant = move |row: &Row| tenant.is_none_or(|tenant| self.live[row].tenant == tenant);
        self.by_end.iter().map(|(_, row)| *row).filter(is_meant)
    }

    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TIER: u64 = 1000;
    const QUOTAS: [u64; 3] = [1000, 400, u64::MAX];

    fn row(position: usize) -> Row {
        Row::at(position).unwrap()
    }

    fn pin(tenant: u16, bytes: u64, until_us: u64) -> Pin {
        Pin { tenant: TenantId(tenant), bytes, until_us }
    }

    #[test]
    fn a_pin_of_years_ends_after_the_longest_time_that_there_is() {
        assert_eq!(Pins::end_of(5, u64::MAX), 5 + PIN_US_MAX);
        assert_eq!(Pins::end_of(5, 10), 15);
        assert_eq!(Pins::end_of(u64::MAX, 10), u64::MAX);
    }

    #[test]
    fn a_pin_ends_at_its_time_and_not_before_and_one_that_was_moved_at_its_new_one() {
        let mut pins = Pins::default();
        pins.set(row(0), pin(0, 10, 20));
        pins.set(row(1), pin(0, 10, 30));
        pins.set(row(0), pin(0, 10, 40));
        assert_eq!((pins.expire(29), pins.expire(30)), (None, Some(row(1))));
        assert_eq!((pins.expire(39), pins.until_us(row(0)), pins.bytes()), (None, Some(40), 10));
        assert_eq!((pins.expire(40), pins.expire(u64::MAX), pins.len()), (Some(row(0)), None, 0));
    }

    proptest! {
        /// Whoever sets no more than there is room for keeps every bound, whatever else happens.
        #[test]
        fn a_tenant_that_pins_all_leaves_others_their_room(
            steps in prop::collection::vec((0usize..40, 0u16..3, 1u64..120, 0u64..60), 1..200),
        ) {
            let (mut pins, mut now_us) = (Pins::default(), 0);
            for (place, tenant, bytes, ttl_us) in steps {
                now_us += ttl_us % 7;
                while pins.expire(now_us).is_some() {}
                let quota = QUOTAS[usize::from(tenant)];
                if place % 5 == 0 {
                    pins.remove(row(place));
                } else if pins.until_us(row(place)).is_none()
                    && bytes <= pins.room_bytes(TenantId(tenant), quota, TIER)
                {
                    pins.set(row(place), pin(tenant, bytes, Pins::end_of(now_us, ttl_us + 1)));
                }
                let of = |tenant: u16| -> u64 {
                    let own = pins.live.values().filter(|pin| pin.tenant == TenantId(tenant));
                    own.map(|pin| pin.bytes).sum()
                };
                prop_assert!(of(0) <= 250 && of(1) <= 100 && of(2) <= 250);
                prop_assert_eq!(pins.bytes(), of(0) + of(1) + of(2));
                prop_assert!(pins.bytes() <= TIER / PINNED_OF_TIER);
                prop_assert!(pins.live.values().all(|pin| pin.until_us > now_us));
                let ends: Vec<u64> = pins.soonest(None).map(|row| pins.live[&row].until_us).collect();
                prop_assert!(ends.is_sorted() && ends.len() == pins.len());
            }
        }
    }
}
