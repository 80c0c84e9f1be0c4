//! The topology as a driver and a host give it.
#![allow(clippy::unwrap_used)]

use cuda_testkit::alone;
use forebay_cuda::topology::{Root, Topology};
use std::collections::HashSet;

#[test]
fn every_gpu_and_every_pair_is_seen_without_a_context() {
    alone("every_gpu_and_every_pair_is_seen_without_a_context", &[("FAKE_CUDA_GPUS", "3")], |fake| {
        let host = Topology::read(fake.driver).unwrap();
        assert_eq!(host.cuda_version, fake.driver.version());
        assert_eq!(host.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 1, 2]);
        let names: HashSet<_> = host.gpus.iter().map(|gpu| (&gpu.uuid, &gpu.pci.address)).collect();
        assert_eq!(names.len(), 3);
        assert!(host.gpus.iter().all(|gpu| !gpu.name.is_empty() && gpu.memory_bytes > 0));
        assert!(host.pairs.len() == 6 && host.pairs.iter().all(|pair| pair.reaches && pair.from != pair.to));
        assert!(host.processors > 0);
        assert_eq!(fake.stat("cuDevicePrimaryCtxRetain"), 0);

        let digest = host.digest();
        assert_eq!(Topology::read(fake.driver).unwrap().digest(), digest);
        fake.control("p2p off");
        let apart = Topology::read(fake.driver).unwrap();
        assert!(apart.pairs.iter().all(|pair| !pair.reaches));
        assert_ne!(apart.digest(), digest);
    });
}

#[test]
fn a_system_that_tells_nothing_leaves_unknowns() {
    alone("a_system_that_tells_nothing_leaves_unknowns", &[], |fake| {
        let nowhere = tempfile::tempdir().unwrap();
        let host = Topology::read_at(fake.driver, &Root::new(nowhere.path())).unwrap();
        assert_eq!(host.gpus.len(), 4);
        assert!(host.gpus.iter().all(|gpu| gpu.pci.bridges.is_none() && gpu.pci.lanes.is_none()));
        assert_eq!((host.memory.total_bytes, host.numa_nodes.len()), (None, 0));
        let json = serde_json::to_string(&host).unwrap();
        assert_eq!(serde_json::from_str::<Topology>(&json).unwrap(), host);
    });
}
