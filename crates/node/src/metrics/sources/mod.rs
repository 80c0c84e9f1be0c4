//! What the parts of the node have to show: each file turns the snapshot of one part into numbers.
//! These files know what the parts count; they must never count themselves.

pub(crate) mod agent;
pub(crate) mod clients;
pub(crate) mod directory;
pub(crate) mod mover;
pub(crate) mod peering;
pub(crate) mod ports;
pub mod process;
pub(crate) mod relays;
mod ssd;
pub(crate) mod store;

use super::{Family, Kind, Metric};

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, help, kind: Kind::Counter }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, help, kind: Kind::Gauge }
}

/// One number for each value of a label.
fn push_each(
    out: &mut Vec<Metric>,
    family: &'static Family,
    label: &'static str,
    values: &[(&'static str, u64)],
) {
    out.extend(values.iter().map(|&(value, number)| Metric::new(family, &[(label, value)], number as f64)));
}

fn push_one(out: &mut Vec<Metric>, family: &'static Family, number: f64) {
    out.push(Metric::new(family, &[], number));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metrics, push, render};
    use forebay_otlp::PushConfig;
    use forebay_store::ssd::{SsdStat, VolumeStat};
    use forebay_store::{DiskSideStat, Stat, TenantId, TenantUse};
    use forebay_transfer::{LinkTelemetry, Telemetry};
    use std::collections::{HashMap, HashSet};
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    /// What all parts show when they have done nothing.
    fn everything() -> Vec<Metric> {
        let mut out = Vec::new();
        agent::collect(&[agent::tests::a_peer()], &mut out);
        directory::collect(&Default::default(), &mut out);
        let client = crate::ClientStat { name: "engine".into(), leases: 1, slots: 1 };
        clients::collect(&Default::default(), &[client], &mut out);
        clients::collect_rings(&crate::node::RingStat::default(), &mut out);
        clients::collect_controls(&Default::default(), &mut out);
        clients::collect_hand_overs(0, None, &mut out);
        let unforgotten = vec![("two".to_owned(), 1)];
        peering::collect(&crate::PeeringStat { unforgotten, ..Default::default() }, &mut out);
        let room = forebay_transfer::listen::RoomStat::default();
        let peers = forebay_net::ServerStats {
            refused: HashMap::from([
                (forebay_net::RefusalCode::Token, 1),
                (forebay_net::RefusalCode::NotEncrypted, 2),
                (forebay_net::RefusalCode::Encrypted, 3),
            ]),
            ..Default::default()
        };
        let unfinished = std::sync::Arc::new(forebay_client::protocol::frame::Unfinished::new(1));
        let clients = Some((room, unfinished));
        let ports = ports::PortsStat { clients, peers: Some(peers), metrics: Some(room) };
        ports::collect(&ports, &mut out);
        relays::collect(&Default::default(), &mut out);
        let telemetry = Telemetry { links: vec![LinkTelemetry::default()], ..Telemetry::default() };
        mover::collect(&telemetry, &mut out);
        process::source()(&mut out);
        let ssd = SsdStat { volumes: vec![VolumeStat::default()], ..SsdStat::default() };
        let mut memory = Stat::default();
        memory.counters.tenants = vec![TenantUse { tenant: TenantId(1), used_bytes: 1, quota_bytes: 2 }];
        store::collect(&memory, Some(&DiskSideStat { ssd, ..DiskSideStat::default() }), &mut out);
        out
    }

    #[test]
    fn names_types_help_and_labels_stay() {
        let metrics = Arc::new(Metrics::new());
        metrics.add("all", |out: &mut Vec<Metric>| out.extend(everything()));
        let config = PushConfig {
            endpoint: "http://127.0.0.1:1".into(),
            service: "forebay-node",
            instance: "left".into(),
            limit: Duration::from_secs(1),
        };
        let _push = push(&config, Duration::from_secs(3600), &metrics).unwrap();
        let promised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metrics/metrics.txt");
        testkit::metrics::assert_promises(&render(metrics.gather()), &promised);
    }

    #[test]
    fn every_number_has_a_name_of_its_own_that_says_what_it_is() {
        let (mut families, mut numbers) = (HashMap::new(), HashSet::new());
        for metric in everything() {
            let name = metric.family.name;
            let is_valid = |character: char| character.is_ascii_lowercase() || character == '_';
            assert!(name.starts_with("forebay_") && name.chars().all(is_valid), "{name}");
            assert_eq!(name.ends_with("_total"), metric.family.kind == Kind::Counter, "{name}");
            let family = families.entry(name).or_insert(metric.family);
            assert_eq!(*family, metric.family, "{name} is two things");
            assert!(
                numbers.insert((name, metric.labels.clone())),
                "{name} {:?} is there twice",
                metric.labels
            );
        }
        assert!(families.len() > 40);
    }
}
