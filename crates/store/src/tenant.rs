//! Tenants and their shares. This file knows who may use how many bytes and who uses how many.

use std::collections::HashMap;

/// Names a tenant of a store. The node numbers them; what they may see follows from the salt in
/// their namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TenantId(pub u16);

impl TenantId {
    /// Nobody's: no chunk is stored for it. In a log's journal it is whose bytes are overwritten
    /// when chunks of others are forgotten.
    pub const NOBODY: TenantId = TenantId(u16::MAX);
}

/// What a tenant uses of what it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantUse {
    pub tenant: TenantId,
    /// Bytes of slots that hold its chunks, including those still being written or drained.
    pub used_bytes: u64,
    pub quota_bytes: u64,
}

/// Bytes charged to each tenant, exact to the slot.
#[derive(Debug)]
pub(crate) struct Quotas {
    default_bytes: u64,
    limits: HashMap<TenantId, u64>,
    /// By the tenant's number, up to the highest that was ever charged.
    used: Vec<u64>,
}

impl Quotas {
    /// `limits` for tenants named there, `default_bytes` for all others.
    pub fn new(default_bytes: u64, limits: impl IntoIterator<Item = (TenantId, u64)>) -> Quotas {
        Quotas { default_bytes, limits: limits.into_iter().collect(), used: Vec::new() }
    }

    pub fn limit_bytes(&self, tenant: TenantId) -> u64 {
        self.limits.get(&tenant).copied().unwrap_or(self.default_bytes)
    }

    pub fn used_bytes(&self, tenant: TenantId) -> u64 {
        self.used.get(usize::from(tenant.0)).copied().unwrap_or(0)
    }

    /// Whether `bytes` more stay within the tenant's limit.
    pub fn has_room(&self, tenant: TenantId, bytes: u64) -> bool {
        self.used_bytes(tenant).checked_add(bytes).is_some_and(|sum| sum <= self.limit_bytes(tenant))
    }

    /// Charges bytes for which [`has_room`](Quotas::has_room) was true.
    pub fn charge(&mut self, tenant: TenantId, bytes: u64) {
        debug_assert!(self.has_room(tenant, bytes));
        self.charge_over(tenant, bytes);
    }

    /// Charges bytes that are there already, within the limit or not.
    pub fn charge_over(&mut self, tenant: TenantId, bytes: u64) {
        let number = usize::from(tenant.0);
        if self.used.len() <= number {
            self.used.resize(number + 1, 0);
        }
        self.used[number] += bytes;
    }

    pub fn credit(&mut self, tenant: TenantId, bytes: u64) {
        debug_assert!(self.used_bytes(tenant) >= bytes, "a tenant is credited what it was charged");
        if let Some(used) = self.used.get_mut(usize::from(tenant.0)) {
            *used = used.saturating_sub(bytes);
        }
    }

    /// All tenants that use something, by number.
    pub fn report(&self) -> Vec<TenantUse> {
        let tenants = (0..=u16::MAX).map(TenantId).zip(&self.used).filter(|(_, used_bytes)| **used_bytes > 0);
        let row = |(tenant, &used_bytes): (TenantId, &u64)| TenantUse {
            tenant,
            used_bytes,
            quota_bytes: self.limit_bytes(tenant),
        };
        tenants.map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_above_the_limit_does_not_fit() {
        let mut quotas = Quotas::new(100, [(TenantId(1), 10)]);
        assert!(quotas.has_room(TenantId(1), 10) && !quotas.has_room(TenantId(1), 11));
        quotas.charge(TenantId(1), 4);
        assert!(quotas.has_room(TenantId(1), 6) && !quotas.has_room(TenantId(1), 7));
        assert!(quotas.has_room(TenantId(0), 100) && !quotas.has_room(TenantId(0), u64::MAX));
    }

    #[test]
    fn credits_return_exactly_what_was_charged() {
        let mut quotas = Quotas::new(100, []);
        quotas.charge(TenantId(3), 70);
        quotas.credit(TenantId(3), 30);
        assert_eq!(quotas.report(), [TenantUse { tenant: TenantId(3), used_bytes: 40, quota_bytes: 100 }]);
        quotas.credit(TenantId(3), 40);
        assert!(quotas.report().is_empty());
    }
}
