//! Whether this process may run, and have memory, at the NUMA nodes of its network devices and
//! disks. GPUs are `forebay preflight gpu`'s to look at.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{Unknown, Warning};
use forebay_cuda::topology::{Root, number_list, own_processors};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Nodes of the host, what this process may use of them, and which devices are at them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NumaFacts {
    /// Processors of each node.
    pub nodes: BTreeMap<u32, BTreeSet<u32>>,
    /// Processors that this process may run on.
    pub processors: BTreeSet<u32>,
    /// Nodes whose memory it may have; `None`: not known.
    pub memory: Option<BTreeSet<u32>>,
    /// Devices by name, and the node that each is at, where the system tells.
    pub devices: Vec<(String, Option<u32>)>,
}

impl NumaFacts {
    /// `nets` and `rdma` are names of devices, `paths` of files on disks.
    pub fn read(root: &Root, nets: &[String], rdma: &[String], paths: &[&Path]) -> NumaFacts {
        let nodes = root.names("sys/devices/system/node").into_iter().filter_map(|name| {
            let node = name.strip_prefix("node")?.parse().ok()?;
            Some((node, number_list(&root.text(&format!("sys/devices/system/node/{name}/cpulist"))?)))
        });
        let status = root.text("proc/self/status").unwrap_or_default();
        let memory = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")).map(number_list);
        let at = |folder: String| node_at(root, &folder);
        let mut devices: Vec<(String, Option<u32>)> = Vec::new();
        // Loopback, bridges and the like are at no node.
        let physical = nets.iter().filter(|net| root.real(&format!("sys/class/net/{net}/device")).is_some());
        devices.extend(physical.map(|net| (net.clone(), at(format!("sys/class/net/{net}/device")))));
        devices.extend(
            rdma.iter().map(|name| (name.clone(), at(format!("sys/class/infiniband/{name}/device")))),
        );
        devices.extend(paths.iter().filter_map(|path| disk_of(root, path)));
        NumaFacts { nodes: nodes.collect(), processors: own_processors(), memory, devices }
    }
}

/// The node of a device whose folder this is. `-1` is what a device says that is at none.
fn node_at(root: &Root, folder: &str) -> Option<u32> {
    root.text(&format!("{folder}/numa_node"))?.parse().ok()
}

/// The disk on which a file, or its folder, lies; `None` if that is no disk of the system.
fn disk_of(root: &Root, path: &Path) -> Option<(String, Option<u32>)> {
    let file = path.ancestors().find_map(|path| path.metadata().ok())?;
    let device = if file.rdev() != 0 { file.rdev() } else { file.dev() };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = root.real(&format!("sys/dev/block/{major}:{minor}"))?;
    // A partition is below its disk, and that below its controller.
    let controller = folder.ancestors().find(|above| above.join("numa_node").exists());
    let text = controller.and_then(|above| std::fs::read_to_string(above.join("numa_node")).ok());
    let name = folder.file_name()?.to_string_lossy().into_owned();
    Some((name, text.and_then(|text| text.trim().parse().ok())))
}

pub fn judge(facts: &NumaFacts) -> Vec<Finding> {
    match facts.nodes.len() {
        0 => {
            let action = "mount /sys in the container";
            let seen = "the system does not tell its NUMA nodes";
            return vec![Finding::bad(Check::Numa, Unknown, "", seen, "NUMA nodes in /sys", action)];
        }
        1 => return vec![Finding::ok(Check::Numa, "", "one NUMA node")],
        _ => {}
    }
    let found: Vec<Finding> =
        facts.devices.iter().filter_map(|(name, node)| judge_device(facts, name, *node)).collect();
    if found.is_empty() {
        let seen = format!("{} NUMA nodes; this process may use those of its devices", facts.nodes.len());
        return vec![Finding::ok(Check::Numa, "", seen)];
    }
    found
}

fn judge_device(facts: &NumaFacts, name: &str, node: Option<u32>) -> Option<Finding> {
    let bad = |severity, seen: String, expected: &str, action: &str| {
        Some(Finding::bad(Check::Numa, severity, name, seen, expected, action))
    };
    let Some(node) = node else {
        let action = "virtual machines hide it: keep the process at one node by hand if the host has several";
        return bad(Unknown, "the system does not tell its NUMA node".into(), "a node", action);
    };
    if facts.nodes.get(&node).is_none_or(|processors| processors.is_disjoint(&facts.processors)) {
        let seen = format!("it is at NUMA node {node}, where this process may not run");
        let action = "widen the process's processors: cpuset of the container, CPUAffinity= in the unit";
        return bad(Warning, seen, "a processor at that node", action);
    }
    if facts.memory.as_ref().is_some_and(|memory| !memory.contains(&node)) {
        let seen = format!("it is at NUMA node {node}, whose memory this process may not have");
        return bad(Warning, seen, "memory at that node", "widen cpuset.mems of the control group");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    fn two_nodes() -> NumaFacts {
        NumaFacts {
            nodes: [(0, [0, 1].into()), (1, [2, 3].into())].into(),
            processors: [0, 1, 2, 3].into(),
            memory: Some([0, 1].into()),
            devices: vec![("eth0".into(), Some(1))],
        }
    }

    #[test]
    fn a_device_at_a_node_that_the_process_may_not_use_is_told() {
        let one = |facts: NumaFacts| judge(&facts).remove(0);
        assert_eq!(one(two_nodes()).severity, Severity::Ok);
        let run = one(NumaFacts { processors: [0, 1].into(), ..two_nodes() });
        assert!(
            run.severity == Warning && run.seen.contains("node 1, where this process may not run"),
            "{run:?}"
        );
        let memory = one(NumaFacts { memory: Some([0].into()), ..two_nodes() });
        assert!(memory.severity == Warning && memory.seen.contains("may not have"), "{memory:?}");
        let hidden = one(NumaFacts { devices: vec![("eth0".into(), None)], ..two_nodes() });
        assert_eq!((hidden.severity, &*hidden.subject), (Unknown, "eth0"));
        assert_eq!(one(NumaFacts::default()).severity, Unknown);
        let single = NumaFacts { nodes: [(0, [0].into())].into(), ..two_nodes() };
        assert_eq!(one(single).severity, Severity::Ok, "with one node there is nothing to choose");
    }

    #[test]
    fn nodes_and_devices_are_read_from_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("sys/devices/system/node/node0/cpulist", "0-1\n"),
            ("sys/devices/system/node/node1/cpulist", "2-3\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/class/net/eth0/device/numa_node", "1\n"),
            ("sys/class/net/br0/mtu", "1500\n"),
            ("sys/class/infiniband/mlx5_0/device/numa_node", "-1\n"),
            ("proc/self/status", "Name:\tx\nMems_allowed_list:\t0-1\n"),
        ] {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let nets = ["eth0".to_owned(), "br0".to_owned()];
        let facts = NumaFacts::read(&Root::new(folder.path()), &nets, &["mlx5_0".into()], &[]);
        assert_eq!(facts.nodes, two_nodes().nodes);
        assert_eq!(facts.memory, Some([0, 1].into()));
        assert_eq!(facts.devices, [("eth0".into(), Some(1)), ("mlx5_0".into(), None)]);
    }
}
