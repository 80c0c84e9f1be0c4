//! Judgements over the host's memory: pages, limits, and which socket it is at.

use super::Severity::{Note, Warning};
use super::{Finding, gpus};
use crate::topology::{GpuFacts, MemoryFacts, NumaNode, Topology, Transparent};

/// A process that may lock less cannot register a slab of a pool with a network card or a disk
/// ring.
const WANTED_LOCK_BYTES: u64 = 1 << 30;

pub fn findings(host: &Topology) -> Vec<Finding> {
    let mut all = Vec::new();
    all.extend(huge_pages(&host.memory));
    all.extend(memory_lock(&host.memory));
    all.extend(nodes(host));
    all
}

/// Huge pages, which make pinning several times faster.
pub fn huge_pages(memory: &MemoryFacts) -> Option<Finding> {
    if memory.huge_pages.unwrap_or(0) > 0 {
        return None;
    }
    let why = "pinning in pages of 4 KiB takes several times as long, and the first copy waits for it";
    if memory.transparent == Some(Transparent::Never) {
        let action = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
        return Some(Finding::new(Warning, "there are no huge pages", why, action));
    }
    if memory.transparent_shared == Some(Transparent::Never) {
        let action = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
        return Some(Finding::new(Note, "memory that processes share has no huge pages", why, action));
    }
    None
}

/// What a process may lock.
pub fn memory_lock(memory: &MemoryFacts) -> Option<Finding> {
    let bytes = memory.memlock_bytes.filter(|bytes| *bytes < WANTED_LOCK_BYTES)?;
    let what = format!("this process may lock {bytes} bytes of memory");
    let why = "network cards and disk rings count registered buffers against that limit, and some drivers pinned memory";
    let action =
        "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container";
    Some(Finding::new(Warning, what, why, action))
}

/// Memory and processors on the right socket.
fn nodes(host: &Topology) -> Vec<Finding> {
    if host.numa_nodes.len() < 2 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let empty: Vec<&NumaNode> = host.numa_nodes.iter().filter(|node| node.total_bytes == Some(0)).collect();
    if !empty.is_empty() {
        let what = format!("{} of {} NUMA nodes have no memory", empty.len(), host.numa_nodes.len());
        let why = "copies to their GPUs cross the link between the sockets, which all of them share";
        all.push(Finding::new(Warning, what, why, "put memory modules at every socket"));
    }
    let far = |gpu: &&GpuFacts| {
        host.numa_nodes.iter().any(|node| Some(node.id) == gpu.pci.numa_node && !node.usable)
    };
    let far: Vec<u16> = host.gpus.iter().filter(far).map(|gpu| gpu.index).collect();
    if !far.is_empty() {
        let what = format!("this process may not run at the NUMA node of {}", gpus(&far));
        let why = "memory that it touches first lies at another socket, whose link to theirs is slower than theirs together";
        let action = "widen the process's processors: taskset, numactl, cpuset of the container";
        all.push(Finding::new(Warning, what, why, action));
    }
    let what = format!("{} NUMA nodes", host.numa_nodes.len());
    let why = "memory at one socket feeds the links of that socket; those of others are bound by the link between sockets";
    all.push(Finding::new(
        Note,
        what,
        why,
        "keep a process's memory at the socket of its GPU, or interleave it",
    ));
    all
}
