//! Recency: in which order chunks were last used, over all and for each tenant. This file knows two
//! linked orders of the same rows.
//!
//! Both orders are lists through one table of links. A row is in both or in neither, and every
//! change is O(1).

use crate::entry::Row;
use crate::tenant::TenantId;

/// The two orders.
const ALL: usize = 0;
const OF_TENANT: usize = 1;

/// Rows from the one used longest ago to the one used last.
#[derive(Debug)]
pub(crate) struct Recency {
    links: Vec<[Link; 2]>,
    all: ListEnds,
    /// By the tenant's number, up to the highest that ever had a row.
    tenants: Vec<ListEnds>,
}

/// Neighbours in one order.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    colder: Option<Row>,
    warmer: Option<Row>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ListEnds {
    coldest: Option<Row>,
    warmest: Option<Row>,
}

impl Recency {
    pub fn new(limit: usize) -> Recency {
        Recency { links: Vec::with_capacity(limit), all: ListEnds::default(), tenants: Vec::new() }
    }

    pub fn push_warmest(&mut self, row: Row, tenant: TenantId) {
        self.make_links(row);
        let number = usize::from(tenant.0);
        if self.tenants.len() <= number {
            self.tenants.resize(number + 1, ListEnds::default());
        }
        for (order, ends) in [(ALL, &mut self.all), (OF_TENANT, &mut self.tenants[number])] {
            let colder = ends.warmest.replace(row);
            match colder {
                Some(colder) => self.links[colder.position()][order].warmer = Some(row),
                None => ends.coldest = Some(row),
            }
            self.links[row.position()][order] = Link { colder, warmer: None };
        }
    }

    pub fn remove(&mut self, row: Row, tenant: TenantId) {
        for order in [ALL, OF_TENANT] {
            let Link { colder, warmer } = std::mem::take(&mut self.links[row.position()][order]);
            *self.ahead_of(colder, order, tenant) = warmer;
            *self.behind(warmer, order, tenant) = colder;
        }
    }

    /// Puts `heir`, which is in neither order, in the place of `row`, which leaves. Both belong to
    /// `tenant`.
    pub fn replace(&mut self, row: Row, heir: Row, tenant: TenantId) {
        self.make_links(heir);
        for order in [ALL, OF_TENANT] {
            let link = std::mem::take(&mut self.links[row.position()][order]);
            *self.ahead_of(link.colder, order, tenant) = Some(heir);
            *self.behind(link.warmer, order, tenant) = Some(heir);
            self.links[heir.position()][order] = link;
        }
    }

    pub fn coldest(&self) -> Option<Row> {
        self.all.coldest
    }

    /// The row used next after this one, which is in the orders; without one, the row used longest
    /// ago.
    pub fn next_warmer(&self, row: Option<Row>) -> Option<Row> {
        row.map_or(self.all.coldest, |row| self.links[row.position()][ALL].warmer)
    }

    pub fn coldest_of(&self, tenant: TenantId) -> Option<Row> {
        self.tenants.get(usize::from(tenant.0)).and_then(|ends| ends.coldest)
    }

    pub fn table_bytes(&self) -> u64 {
        (self.links.capacity() * size_of::<[Link; 2]>()) as u64
    }

    fn make_links(&mut self, row: Row) {
        if self.links.len() <= row.position() {
            self.links.resize(row.position() + 1, Default::default());
        }
    }

    /// What points from `row` to the next warmer one; from the cold end if there is no `row`.
    fn ahead_of(&mut self, row: Option<Row>, order: usize, tenant: TenantId) -> &mut Option<Row> {
        match row {
            Some(row) => &mut self.links[row.position()][order].warmer,
            None => &mut self.ends(order, tenant).coldest,
        }
    }

    /// What points from `row` to the next colder one; from the warm end if there is no `row`.
    fn behind(&mut self, row: Option<Row>, order: usize, tenant: TenantId) -> &mut Option<Row> {
        match row {
            Some(row) => &mut self.links[row.position()][order].colder,
            None => &mut self.ends(order, tenant).warmest,
        }
    }

    fn ends(&mut self, order: usize, tenant: TenantId) -> &mut ListEnds {
        match order {
            ALL => &mut self.all,
            _ => &mut self.tenants[usize::from(tenant.0)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TENANTS: u16 = 2;

    fn row(position: usize) -> Row {
        Row::at(position).unwrap()
    }

    fn tenant_of(position: usize) -> TenantId {
        TenantId(position as u16 % TENANTS)
    }

    /// A row's order read off the links, from cold to warm, checking the way back.
    fn order(recency: &Recency, order: usize, ends: ListEnds) -> Vec<usize> {
        let mut seen = Vec::new();
        let (mut at, mut colder) = (ends.coldest, None);
        while let Some(row) = at {
            let link = recency.links[row.position()][order];
            assert_eq!(link.colder, colder);
            seen.push(row.position());
            (at, colder) = (link.warmer, Some(row));
        }
        assert_eq!(ends.warmest, colder);
        seen
    }

    proptest! {
        #[test]
        fn both_orders_follow_every_use(steps in prop::collection::vec((0usize..3, 0usize..8, 0usize..8), 1..200)) {
            let mut recency = Recency::new(8);
            let mut model: Vec<usize> = Vec::new();
            for (step, one, other) in steps {
                let place = model.iter().position(|row| *row == one);
                match (step, place) {
                    (0, None) => {
                        recency.push_warmest(row(one), tenant_of(one));
                        model.push(one);
                    }
                    (1, Some(place)) => {
                        recency.remove(row(one), tenant_of(one));
                        model.remove(place);
                    }
                    (2, Some(place)) if !model.contains(&other) && tenant_of(one) == tenant_of(other) => {
                        recency.replace(row(one), row(other), tenant_of(one));
                        model[place] = other;
                    }
                    _ => {}
                }
                prop_assert_eq!(&order(&recency, ALL, recency.all), &model);
                for tenant in (0..TENANTS).map(TenantId) {
                    let ends = recency.tenants.get(usize::from(tenant.0)).copied().unwrap_or_default();
                    let own: Vec<usize> = model.iter().copied().filter(|row| tenant_of(*row) == tenant).collect();
                    prop_assert_eq!(order(&recency, OF_TENANT, ends), own);
                    prop_assert_eq!(ends.coldest.is_none(), ends.warmest.is_none());
                }
            }
        }
    }

    #[test]
    fn a_row_of_links_is_sixteen_bytes() {
        assert_eq!(size_of::<[Link; 2]>(), 16);
    }
}
