//! Whether packets to a peer leave by the device at which its own arrive, and come back. Where they
//! do not, Linux drops what arrives if `rp_filter` is strict, and ways differ in speed if it is
//! not.

use crate::cmd::preflight::net::finding::{Check, Finding};
use crate::cmd::preflight::net::way::Way;
use forebay_cuda::preflight::Severity::{Fault, Unknown, Warning};
use forebay_cuda::topology::Root;
use std::net::IpAddr;

/// What is known of the way to a peer and back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteFacts {
    /// Where the peer is.
    pub peer: IpAddr,
    /// The way there, or why there is none.
    pub way: Result<Way, String>,
    /// The device that has the address at which this host listens, if it is one address.
    pub listens_at: Option<Listening>,
    /// The peer's way to this host, where the peer told.
    pub back: Option<Way>,
    /// The address from which the peer sees datagrams of this host come.
    pub seen_as: Option<IpAddr>,
}

/// Where peers' packets arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listening {
    pub address: IpAddr,
    pub device: String,
    pub drops_strangers: bool,
}

impl Listening {
    pub fn new(address: IpAddr, device: &str, root: &Root) -> Listening {
        let drops_strangers = address.is_ipv4() && is_strict(root, device);
        Listening { address, device: device.to_owned(), drops_strangers }
    }
}

/// Whether what arrives at a device is dropped if the way back would be by another one. The larger
/// of both values counts; 2 is loose.
fn is_strict(root: &Root, device: &str) -> bool {
    let value = |name: &str| -> u8 {
        root.text(&format!("proc/sys/net/ipv4/conf/{name}/rp_filter"))
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    };
    value("all").max(value(device)) == 1
}

pub fn judge(peer: &str, facts: &RouteFacts) -> Finding {
    let bad = |severity, seen: String, expected: &str, action: &str| {
        Finding::bad(Check::Route, severity, peer, seen, expected, action)
    };
    let way = match &facts.way {
        Ok(way) => way,
        Err(why) => {
            return bad(Fault, format!("there is no way to it: {why}"), "a route", "see `ip route get`");
        }
    };
    if way.device.is_empty() {
        return bad(
            Unknown,
            "the kernel does not tell the way to it".into(),
            "a route",
            "see `ip route get`",
        );
    }
    if way.device != "lo"
        && let Some(at) = facts.listens_at.as_ref().filter(|at| at.device != way.device)
    {
        return crossed(peer, way, at);
    }
    if let Some(source) =
        facts.back.as_ref().and_then(|back| back.source).filter(|source| *source != facts.peer)
    {
        let seen =
            format!("what it sends to this host leaves from {source}, and it is reached at {}", facts.peer);
        let action = "list it with that address, or give its networks routing tables of their own";
        return bad(Warning, seen, "one address for both directions", action);
    }
    if let (Some(source), Some(seen_as)) = (way.source, facts.seen_as)
        && source != seen_as
    {
        let seen = format!("it sees this host as {seen_as}, which sends from {source}");
        let action = "peers connect to this host too: have them reach it without address translation";
        return bad(Warning, seen, "no address translation", action);
    }
    let over = way.gateway.map_or(String::new(), |gateway| format!(" over {gateway}"));
    Finding::ok(Check::Route, peer, format!("packets leave by {}{over}", way.device))
}

/// Packets of the peer arrive at another device than that by which this host's leave.
fn crossed(peer: &str, way: &Way, at: &Listening) -> Finding {
    let Listening { address, device, drops_strangers } = at;
    let seen =
        format!("packets to it leave by {}, and its own arrive at {device}, which has {address}", way.device);
    let expected = format!("the way to it by {device}");
    let action =
        "listen at the address of the device that leads to peers, or give each its own routing table";
    let (severity, seen) = match drops_strangers {
        true => (Fault, format!("{seen} and drops them (rp_filter is 1)")),
        false => (Warning, seen),
    };
    Finding::bad(Check::Route, severity, peer, seen, expected, action)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    fn facts() -> RouteFacts {
        let way = |device: &str, source: &str| Way {
            device: device.into(),
            source: Some(source.parse().unwrap()),
            ..Way::default()
        };
        let address = "10.0.0.1".parse().unwrap();
        RouteFacts {
            peer: "10.0.0.2".parse().unwrap(),
            way: Ok(way("eth0", "10.0.0.1")),
            listens_at: Some(Listening { address, device: "eth0".into(), drops_strangers: true }),
            back: Some(way("eth0", "10.0.0.2")),
            seen_as: Some(address),
        }
    }

    /// Makes a way a bad one.
    type Harm = fn(&mut RouteFacts);

    #[test]
    fn packets_go_and_come_by_one_device_and_address() {
        let other = || "10.9.9.9".parse().ok();
        let table: [(Harm, Severity, &str); 8] = [
            (|_| {}, Severity::Ok, "packets leave by eth0"),
            (
                |facts| facts.way = Err("Network is unreachable".into()),
                Fault,
                "no way to it: Network is unreachable",
            ),
            (|facts| facts.way = Ok(Way::default()), Unknown, "does not tell"),
            (
                |facts| facts.listens_at.as_mut().unwrap().device = "eth1".into(),
                Fault,
                "leave by eth0, and its own arrive at eth1, which has 10.0.0.1 and drops them",
            ),
            (
                |facts| {
                    let at = facts.listens_at.as_mut().unwrap();
                    (at.device, at.drops_strangers) = ("eth1".into(), false);
                },
                Warning,
                "its own arrive at eth1, which has 10.0.0.1",
            ),
            (|facts| facts.way.as_mut().unwrap().device = "lo".into(), Severity::Ok, "leave by lo"),
            (|facts| facts.back = None, Severity::Ok, "leave by eth0"),
            (|facts| facts.seen_as = None, Severity::Ok, "leave by eth0"),
        ];
        for (harm, severity, says) in table {
            let mut facts = facts();
            harm(&mut facts);
            let found = judge("right", &facts);
            assert!(found.severity == severity && found.seen.contains(says), "{found:?}");
        }
        let mut back = facts();
        back.back.as_mut().unwrap().source = other();
        assert!(judge("right", &back).seen.contains("leaves from 10.9.9.9"));
        let translated = judge("right", &RouteFacts { seen_as: other(), ..facts() });
        assert!(translated.severity == Warning && translated.seen.contains("sees this host as 10.9.9.9"));
    }

    #[test]
    fn the_larger_rp_filter_counts_and_2_is_loose() {
        for (all, device, is) in [("0", "0", false), ("1", "0", true), ("0", "1", true), ("2", "1", false)] {
            let folder = tempfile::tempdir().unwrap();
            for (name, value) in [("all", all), ("eth0", device)] {
                let conf = folder.path().join("proc/sys/net/ipv4/conf").join(name);
                std::fs::create_dir_all(&conf).unwrap();
                std::fs::write(conf.join("rp_filter"), format!("{value}\n")).unwrap();
            }
            assert_eq!(is_strict(&Root::new(folder.path()), "eth0"), is, "{all} {device}");
        }
    }
}
