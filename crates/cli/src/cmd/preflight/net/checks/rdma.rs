//! Ports of RDMA devices, as `/sys/class/infiniband` has them: whether they are up, how fast they
//! came up, and whether RoCE has an address that routers carry. Bytes are not sent.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{Fault, Unknown, Warning};
use forebay_cuda::topology::Root;
use serde::Serialize;

const FOLDER: &str = "sys/class/infiniband";
/// The key of a partition that all are members of; without its highest bit a port is a limited
/// member, which reaches full members only.
const FULL_MEMBER: u16 = 0x8000;

/// A port of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RdmaPort {
    pub device: String,
    pub port: u32,
    /// `4: ACTIVE`; as the other texts, what the file says.
    pub state: String,
    pub physical_state: String,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: String,
    pub gbit_per_s: Option<f64>,
    /// Entries of its table of addresses that are RoCE v2.
    pub v2_gids: Vec<u32>,
    /// Keys of its partitions that are in use.
    pub partition_keys: Vec<u16>,
    /// Whether ECN is on for RoCE, where the driver tells.
    pub ecn: Option<bool>,
}

/// The ports of all devices, by name.
pub fn read(root: &Root) -> Vec<RdmaPort> {
    let mut all = Vec::new();
    for device in root.names(FOLDER) {
        for port in root.names(&format!("{FOLDER}/{device}/ports")) {
            let Ok(number) = port.parse() else { continue };
            all.push(read_port(root, &device, number));
        }
    }
    all.sort_by(|one, other| (&one.device, one.port).cmp(&(&other.device, other.port)));
    all
}

fn read_port(root: &Root, device: &str, port: u32) -> RdmaPort {
    let folder = format!("{FOLDER}/{device}/ports/{port}");
    let text = |file: &str| root.text(&format!("{folder}/{file}")).unwrap_or_default();
    let numbers = |below: &str| {
        let mut found: Vec<u32> =
            root.names(&format!("{folder}/{below}")).iter().filter_map(|name| name.parse().ok()).collect();
        found.sort_unstable();
        found
    };
    // An entry without an address has a type all the same.
    let is_used = |gid: &u32| text(&format!("gids/{gid}")).bytes().any(|byte| !b"0:".contains(&byte));
    let is_v2 = |gid: &u32| text(&format!("gid_attrs/types/{gid}")).contains("v2");
    let keys = numbers("pkeys").into_iter().filter_map(|at| key_of(&text(&format!("pkeys/{at}"))));
    let net_device =
        root.names(&format!("{FOLDER}/{device}/device/net")).into_iter().next().unwrap_or_default();
    let ecn = format!("sys/class/net/{net_device}/ecn/roce_np/enable");
    let is_enabled =
        |priority: &String| root.text(&format!("{ecn}/{priority}")).is_some_and(|text| text == "1");
    let priorities = root.names(&ecn);
    RdmaPort {
        device: device.to_owned(),
        port,
        state: text("state"),
        physical_state: text("phys_state"),
        link_layer: text("link_layer"),
        gbit_per_s: text("rate").split_whitespace().next().and_then(|number| number.parse().ok()),
        v2_gids: numbers("gids").into_iter().filter(|gid| is_used(gid) && is_v2(gid)).collect(),
        partition_keys: keys.collect(),
        ecn: (!priorities.is_empty()).then(|| priorities.iter().any(is_enabled)),
    }
}

/// A key of a partition, if the entry is in use.
fn key_of(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok().filter(|key| *key & !FULL_MEMBER != 0)
}

impl RdmaPort {
    pub fn is_up(&self) -> bool {
        self.state.contains("ACTIVE")
    }

    /// As configurations name it.
    pub fn name(&self) -> String {
        format!("{}:{}", self.device, self.port)
    }

    fn is_named(&self, names: &[String]) -> bool {
        names.is_empty() || names.iter().any(|name| *name == self.device || *name == self.name())
    }
}

/// `wanted`: the devices that the configuration gives to rails of RDMA, none of them named for all;
/// `None` where it has no such rail.
pub fn judge(ports: &[RdmaPort], wanted: Option<&[String]>) -> Vec<Finding> {
    let Some(names) = wanted else {
        let seen = match ports.len() {
            0 => "no RDMA devices, and none is asked for".into(),
            _ => format!("{} RDMA ports, and no rail of the configuration uses them", ports.len()),
        };
        return vec![Finding::ok(Check::Rdma, "", seen)];
    };
    let used: Vec<&RdmaPort> = ports.iter().filter(|port| port.is_named(names)).collect();
    let mut found: Vec<Finding> = missing(ports, names);
    if used.is_empty() && found.is_empty() {
        let action =
            "give the container its devices (/dev/infiniband), load the driver, or take the rail out";
        found.push(Finding::bad(
            Check::Rdma,
            Fault,
            "",
            "there are no RDMA devices",
            "devices for peers.rails",
            action,
        ));
    }
    let best = used.iter().filter_map(|port| port.gbit_per_s).fold(0.0, f64::max);
    found.extend(used.iter().map(|port| judge_port(port, best)));
    found
}

/// Devices that are named and not there.
fn missing(ports: &[RdmaPort], names: &[String]) -> Vec<Finding> {
    let is_there = |name: &String| ports.iter().any(|port| port.is_named(std::slice::from_ref(name)));
    let missing = names.iter().filter(|name| !is_there(name));
    let action = "give the container its devices (/dev/infiniband), or correct peers.rails.devices";
    missing
        .map(|name| {
            Finding::bad(Check::Rdma, Fault, name, "there is no such device", "a device of this host", action)
        })
        .collect()
}

fn judge_port(port: &RdmaPort, best_gbit_per_s: f64) -> Finding {
    let name = port.name();
    let bad = |severity, seen: String, expected: &str, action: &str| {
        Finding::bad(Check::Rdma, severity, &*name, seen, expected, action)
    };
    if port.state.is_empty() {
        return bad(
            Unknown,
            "the system does not tell its state".into(),
            "ACTIVE",
            "mount /sys in the container",
        );
    }
    if !port.is_up() {
        let seen = format!("its state is {}, its link is {}", port.state, port.physical_state);
        return bad(Fault, seen, "4: ACTIVE", "look at the cable, the switch's port and the subnet manager");
    }
    if port.link_layer == "Ethernet" && port.v2_gids.is_empty() {
        let action = "give its network device an IP address, and the container its network (hostNetwork or a rail's own)";
        return bad(Fault, "it has no address of RoCE v2".into(), "a GID of type RoCE v2", action);
    }
    let full = port.partition_keys.iter().any(|key| key & FULL_MEMBER != 0);
    if port.link_layer == "InfiniBand" && !full {
        let action = "have the subnet manager make the port a full member";
        return bad(Warning, "it is a limited member of its partitions".into(), "a full member", action);
    }
    match port.gbit_per_s {
        None => {
            bad(Unknown, "the system does not tell its rate".into(), "a rate", "mount /sys in the container")
        }
        Some(rate) if rate < best_gbit_per_s => {
            let (seen, expected) =
                (format!("it runs at {rate} Gbit/s"), format!("{best_gbit_per_s}, as the best port"));
            bad(Warning, seen, &expected, "look at the cable, and at what the switch's port came up with")
        }
        Some(_) if port.ecn == Some(false) => bad(
            Warning,
            "ECN is off for RoCE".into(),
            "ECN or PFC",
            "turn it on here and at the switches, or PFC",
        ),
        Some(rate) => {
            let gids = port.v2_gids.first().map_or(String::new(), |gid| format!(", GID {gid} is RoCE v2"));
            Finding::ok(Check::Rdma, &*name, format!("it is up at {rate} Gbit/s{gids}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;
    use std::path::Path;

    /// Files of a port, and what is in them.
    type Files<'a> = &'a [(&'a str, &'a str)];

    /// A port as mlx5 shows one, with other files on top.
    fn write_port(root: &Path, device: &str, files: Files<'_>) {
        let usual = [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("link_layer", "Ethernet"),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("gids/0", "fe80:0000:0000:0000:0ac0:ebff:fe00:0001"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
            ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"),
            ("gid_attrs/types/0", "IB/RoCE v1"),
            ("gid_attrs/types/1", "RoCE v2"),
            ("gid_attrs/types/2", "RoCE v2"),
            ("pkeys/0", "0xffff"),
            ("pkeys/1", "0x0000"),
        ];
        for (file, text) in usual.iter().chain(files) {
            let path = root.join(FOLDER).join(device).join("ports/1").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn a_port_is_read_with_its_addresses_and_keys() {
        let folder = tempfile::tempdir().unwrap();
        write_port(folder.path(), "mlx5_0", &[]);
        let enable = folder.path().join("sys/class/net/eth2/ecn/roce_np/enable");
        let net = folder.path().join(FOLDER).join("mlx5_0/device/net/eth2");
        for folder in [&enable, &net] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(enable.join("3"), "1\n").unwrap();
        let ports = read(&Root::new(folder.path()));
        let RdmaPort { ref v2_gids, ref partition_keys, gbit_per_s, ecn, .. } = ports[0];
        assert_eq!((ports.len(), ports[0].name()), (1, "mlx5_0:1".to_owned()));
        assert_eq!((&v2_gids[..], &partition_keys[..]), (&[1][..], &[0xFFFF][..]));
        assert_eq!((gbit_per_s, ecn), (Some(400.0), Some(true)));
        assert_eq!(read(&Root::new(Path::new("/no/such/folder"))), []);
    }

    #[test]
    fn a_port_that_is_down_or_has_no_address_is_a_fault() {
        let table: [(Files<'_>, Severity, &str); 8] = [
            (&[], Severity::Ok, "it is up at 400 Gbit/s, GID 1 is RoCE v2"),
            (
                &[("state", "1: DOWN"), ("phys_state", "3: Disabled")],
                Fault,
                "1: DOWN, its link is 3: Disabled",
            ),
            (&[("gid_attrs/types/1", "IB/RoCE v1")], Fault, "no address of RoCE v2"),
            (&[("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000")], Fault, "no address of RoCE v2"),
            (&[("rate", "100 Gb/sec (4X EDR)")], Warning, "it runs at 100 Gbit/s"),
            (&[("rate", "")], Unknown, "does not tell its rate"),
            (&[("state", "")], Unknown, "does not tell its state"),
            (&[("link_layer", "InfiniBand"), ("pkeys/0", "0x7fff")], Warning, "limited member"),
        ];
        for (files, severity, says) in table {
            let folder = tempfile::tempdir().unwrap();
            write_port(folder.path(), "mlx5_0", &[]);
            write_port(folder.path(), "mlx5_1", files);
            let found = judge(&read(&Root::new(folder.path())), Some(&[]));
            assert!(found[1].severity == severity && found[1].seen.contains(says), "{found:?}");
        }
    }

    #[test]
    fn devices_that_are_asked_for_have_to_be_there_and_others_need_not() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path());
        assert_eq!(judge(&read(&root), None)[0].severity, Severity::Ok);
        assert!(judge(&read(&root), Some(&[]))[0].seen.contains("no RDMA devices"));
        write_port(folder.path(), "mlx5_0", &[("state", "1: DOWN")]);
        write_port(folder.path(), "mlx5_1", &[]);
        let ports = read(&root);
        assert!(judge(&ports, None)[0].seen.contains("2 RDMA ports, and no rail"));
        let named = judge(&ports, Some(&["mlx5_1:1".into()]));
        assert_eq!(named.iter().map(|found| found.severity).collect::<Vec<_>>(), [Severity::Ok]);
        let gone = judge(&ports, Some(&["mlx5_7:1".into()]));
        assert!(gone.len() == 1 && gone[0].severity == Fault && gone[0].subject == "mlx5_7:1", "{gone:?}");
    }
}
