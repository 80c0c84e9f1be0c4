//! What tenants may use, and whose chunks are sealed on SSD. This file knows numbers and where the
//! keys are; it must never keep a key.

use super::{ConfigError, size_in};
use crate::size;
use forebay_store::ssd::TenantKeys;
use forebay_store::{SLOT_ALIGN_BYTES, TenantId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantsConfig {
    /// A file with a key for each tenant whose chunks are sealed before they go to SSD.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_file: Option<PathBuf>,
    /// Memory of a tenant that has no quota of its own; all of it otherwise.
    #[serde(skip_serializing_if = "Option::is_none", with = "size::optional")]
    pub memory: Option<u64>,
    /// The same on SSD.
    #[serde(skip_serializing_if = "Option::is_none", with = "size::optional")]
    pub ssd: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub quotas: Vec<QuotaConfig>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaConfig {
    pub tenant: u16,
    /// Bytes of memory; as others otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "size::optional")]
    pub memory: Option<u64>,
    /// Bytes on SSD; as others otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "size::optional")]
    pub ssd: Option<u64>,
}

/// What a tier is told: a quota for everybody, and those of single tenants.
pub type Quotas = (u64, Vec<(TenantId, u64)>);

impl TenantsConfig {
    pub fn memory_quotas(&self) -> Quotas {
        self.quotas_of(self.memory, |quota| quota.memory)
    }

    pub fn ssd_quotas(&self) -> Quotas {
        self.quotas_of(self.ssd, |quota| quota.ssd)
    }

    fn quotas_of(&self, all: Option<u64>, of: impl Fn(&QuotaConfig) -> Option<u64>) -> Quotas {
        let named = self.quotas.iter().filter_map(|quota| Some((TenantId(quota.tenant), of(quota)?)));
        (all.unwrap_or(u64::MAX), named.collect())
    }

    pub(super) fn check(&self, memory_bytes: u64, ssd_bytes: u64) -> Result<(), ConfigError> {
        let quotas = || self.quotas.iter();
        for bytes in self.memory.into_iter().chain(quotas().filter_map(|quota| quota.memory)) {
            size_in("a tenant's quota of memory", bytes, SLOT_ALIGN_BYTES, memory_bytes)?;
        }
        let on_ssd: Vec<u64> = self.ssd.into_iter().chain(quotas().filter_map(|quota| quota.ssd)).collect();
        if ssd_bytes == 0 && (self.key_file.is_some() || !on_ssd.is_empty()) {
            let field = "the number of [[ssd]] beside tenants.key_file or a tenant's quota of ssd";
            return Err(ConfigError::value(field, 0, "one or more"));
        }
        for bytes in on_ssd {
            size_in("a tenant's quota of ssd", bytes, SLOT_ALIGN_BYTES, ssd_bytes)?;
        }
        let mut tenants: Vec<u16> = quotas().map(|quota| quota.tenant).collect();
        tenants.sort_unstable();
        match tenants.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(pair) => {
                Err(ConfigError::value("the tenant of two tenants.quotas", pair[0], "each tenant once"))
            }
        }
    }

    /// The keys of now; nobody's without a file.
    pub fn read_keys(&self) -> Result<TenantKeys, ConfigError> {
        Ok(self.key_file.as_deref().map_or(Ok(TenantKeys::default()), TenantKeys::from_file)?)
    }
}
