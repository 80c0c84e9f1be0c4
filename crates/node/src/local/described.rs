//! What clients say of themselves for `forebay explain`: what their namespaces are made of, and
//! what their last requests found and loaded. Both are of fixed size; what gives way is counted.

use forebay_client::protocol::explain::{Description, Outcome};
use forebay_store::TenantId;
use std::collections::VecDeque;

/// Namespaces that are remembered, of all clients together.
const NAMESPACES_MAX: usize = 256;
/// Requests that are remembered, of all clients together.
const OUTCOMES_MAX: usize = 4096;

/// A namespace, and who has described it last.
#[derive(Debug, Clone)]
pub struct Described {
    pub description: Description,
    pub tenant: TenantId,
    pub client: String,
}

#[derive(Debug, Default)]
pub struct DescribedByClients {
    /// The one that was described last is the last.
    namespaces: VecDeque<Described>,
    outcomes: VecDeque<(TenantId, Outcome)>,
    forgotten: u64,
}

impl DescribedByClients {
    pub fn describe(&mut self, described: Described) {
        self.namespaces.retain(|one| one.description.key != described.description.key);
        self.forgotten += push(&mut self.namespaces, described, NAMESPACES_MAX);
    }

    pub fn note(&mut self, tenant: TenantId, outcome: Outcome) {
        self.forgotten += push(&mut self.outcomes, (tenant, outcome), OUTCOMES_MAX);
    }

    /// The namespaces that clients of a tenant have described, in the order of their keys.
    pub fn of_tenant(&self, tenant: TenantId) -> Vec<Description> {
        let theirs = self.namespaces.iter().filter(|one| one.tenant == tenant);
        let mut all: Vec<_> = theirs.map(|one| one.description.clone()).collect();
        all.sort_by_key(|one| *one.key.as_bytes());
        all
    }

    pub fn namespaces(&self) -> Vec<Described> {
        self.namespaces.iter().cloned().collect()
    }

    /// What came of the requests whose name has this in it, and whose they were, the last one
    /// first: an engine adds to the name that its router or client gave.
    pub fn outcomes_of(&self, name: &str) -> Vec<(TenantId, Outcome)> {
        self.outcomes.iter().rev().filter(|(_, outcome)| outcome.request.contains(name)).cloned().collect()
    }

    /// Namespaces and requests that gave way to others.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

/// Puts one more behind the others, and says how many gave way.
fn push<T>(all: &mut VecDeque<T>, one: T, limit: usize) -> u64 {
    let is_full = all.len() >= limit;
    if is_full {
        all.pop_front();
    }
    all.push_back(one);
    u64::from(is_full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_kv::NamespaceKey;

    fn described(number: usize, client: &str) -> Described {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        let description =
            Description { key: NamespaceKey::from_bytes(key), chunk_tokens: 64, facts: Default::default() };
        Described { description, tenant: TenantId(0), client: client.into() }
    }

    #[test]
    fn a_namespace_is_kept_once_and_those_that_give_way_are_counted() {
        let mut all = DescribedByClients::default();
        (0..NAMESPACES_MAX).for_each(|number| all.describe(described(number, "one")));
        all.describe(described(0, "other"));
        assert_eq!((all.namespaces().len(), all.forgotten()), (NAMESPACES_MAX, 0));
        assert_eq!(all.namespaces().last().unwrap().client, "other");
        all.describe(described(NAMESPACES_MAX, "one"));
        assert_eq!((all.namespaces().len(), all.forgotten()), (NAMESPACES_MAX, 1));
        assert_eq!(all.namespaces()[0].description.key, described(2, "").description.key);
    }

    #[test]
    fn the_last_request_with_a_name_is_told_first() {
        let mut all = DescribedByClients::default();
        for (request, loaded_tokens) in [("cmpl-a-0", 1), ("cmpl-b-0", 2), ("cmpl-a-1", 3)] {
            all.note(TenantId(3), Outcome { request: request.into(), loaded_tokens, ..Outcome::default() });
        }
        let loaded: Vec<u32> = all.outcomes_of("cmpl-a").iter().map(|(_, one)| one.loaded_tokens).collect();
        assert_eq!(loaded, [3, 1]);
        (0..OUTCOMES_MAX).for_each(|_| all.note(TenantId(0), Outcome::default()));
        assert_eq!((all.outcomes_of("cmpl").len(), all.forgotten()), (0, 3));
    }
}
