//! What a host is made of, as far as copies between its memory and its GPUs are concerned: GPUs,
//! their PCIe links, who reaches whom, memory and processors. Reading it makes no context and takes
//! milliseconds.

mod host;
mod pci;
mod root;

pub use host::{MemoryFacts, NumaNode, Transparent, number_list, own_processors};
pub use pci::PciPlace;
pub use root::Root;

use crate::driver::{CudaError, Driver, abi};
use crate::gpu::Gpu;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// A host, its GPUs in the order in which this process sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// The newest CUDA version that the driver supports, as 1000 x major + 10 x minor.
    pub cuda_version: i32,
    pub gpus: Vec<GpuFacts>,
    /// Every ordered pair of two GPUs.
    pub pairs: Vec<Pair>,
    pub memory: MemoryFacts,
    /// Its NUMA nodes; none where the system does not tell.
    pub numa_nodes: Vec<NumaNode>,
    /// Processors that this process may run on.
    pub processors: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    pub index: u16,
    pub name: String,
    pub uuid: String,
    pub memory_bytes: u64,
    /// Whether it reads host memory by the host's own page tables, as GPUs that are joined to the
    /// processor by NVLink do.
    pub coherent: Option<bool>,
    pub pci: PciPlace,
}

/// One GPU's way to the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The GPU that reads and writes.
    pub from: u16,
    /// The GPU whose memory it is.
    pub to: u16,
    pub reaches: bool,
    /// The driver's rank of it among all pairs.
    pub rank: Option<i32>,
}

impl Topology {
    pub fn read(driver: &'static Driver) -> Result<Topology, CudaError> {
        Topology::read_at(driver, &Root::default())
    }

    /// The same, with what the kernel tells taken from another tree.
    pub fn read_at(driver: &'static Driver, root: &Root) -> Result<Topology, CudaError> {
        let gpus: Vec<Gpu> =
            (0..Gpu::count(driver)?).map(|index| Gpu::find(driver, index)).collect::<Result<_, _>>()?;
        let pairs = gpus.iter().flat_map(|from| gpus.iter().map(move |to| (from, to)));
        let processors = host::own_processors();
        Ok(Topology {
            cuda_version: driver.version(),
            gpus: gpus.iter().map(|gpu| GpuFacts::read(gpu, root)).collect::<Result<_, _>>()?,
            pairs: pairs
                .filter(|(from, to)| from.index() != to.index())
                .map(|(from, to)| Pair::read(from, to))
                .collect::<Result<_, _>>()?,
            memory: MemoryFacts::read_at(root),
            numa_nodes: host::numa_nodes(root, &processors),
            processors: processors.len() as u32,
        })
    }

    /// What measurements of this host are kept under: equal only where the same GPUs are joined in
    /// the same way. Link generations are not part of it, since idle GPUs lower theirs.
    pub fn digest(&self) -> String {
        let gpu = |gpu: &GpuFacts| {
            let pci = &gpu.pci;
            format!("{} {} {:?} {:?} {:?}", gpu.uuid, pci.address, pci.lanes, pci.bridges, pci.numa_node)
        };
        let gpus: Vec<String> = self.gpus.iter().map(gpu).collect();
        let nodes: Vec<u16> = self.numa_nodes.iter().map(|node| node.id).collect();
        let all = format!("{} {gpus:?} {:?} {nodes:?}", self.cuda_version, self.pairs);
        format!("{:016x}", xxh3_64(all.as_bytes()))
    }
}

impl GpuFacts {
    fn read(gpu: &Gpu, root: &Root) -> Result<GpuFacts, CudaError> {
        Ok(GpuFacts {
            index: gpu.index(),
            name: gpu.name()?,
            uuid: uuid_text(gpu.uuid()?),
            memory_bytes: gpu.memory_bytes()?,
            coherent: gpu.attribute(abi::ATTRIBUTE_HOST_PAGE_TABLES).ok().map(|value| value != 0),
            pci: PciPlace::read(root, &gpu.bus_id()?),
        })
    }
}

impl Pair {
    fn read(from: &Gpu, to: &Gpu) -> Result<Pair, CudaError> {
        let rank = from.rank_to(to).ok();
        Ok(Pair { from: from.index(), to: to.index(), reaches: from.can_reach(to)?, rank })
    }
}

/// A UUID as the vendor's tools print it.
fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        let dash = if matches!(at, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{dash}{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_the_vendors_tools_print_it() {
        let uuid = std::array::from_fn(|byte| byte as u8);
        assert_eq!(uuid_text(uuid), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn the_digest_changes_with_what_rates_depend_on_and_not_with_what_idling_changes() {
        let gpu = GpuFacts { uuid: "GPU-1".into(), ..GpuFacts::default() };
        let host = Topology { gpus: vec![gpu], ..Topology::default() };
        let changed = |change: fn(&mut Topology)| {
            let mut other = host.clone();
            change(&mut other);
            other.digest() != host.digest()
        };
        assert!(changed(|host| host.gpus[0].uuid = "GPU-2".into()));
        assert!(changed(|host| host.gpus[0].pci.lanes = Some(8)));
        assert!(changed(|host| host.pairs.push(Pair { from: 0, to: 1, reaches: true, rank: None })));
        assert!(changed(|host| host.cuda_version = 13_000));
        assert!(!changed(|host| host.gpus[0].pci.generation = Some(1)));
        assert!(!changed(|host| host.memory.available_bytes = Some(1)));
    }
}
