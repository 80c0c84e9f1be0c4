//! Preflight: each thing that slows copies down is found, on hosts that have nothing else wrong,
//! and nothing is found on a host that is as it should be.
#![allow(clippy::unwrap_used)]

use forebay_cuda::driver::LoadError;
use forebay_cuda::peers::{Distrust, Means, Untrusted};
use forebay_cuda::preflight::{Finding, Severity, findings, without_driver, worst};
use forebay_cuda::profile::{BothWays, LinkRate, PairRate, Profile};
use forebay_cuda::topology::{GpuFacts, MemoryFacts, NumaNode, Pair, PciPlace, Topology, Transparent};

/// Four GPUs with links of their own, all of which reach each other; huge pages, and no limits.
fn good() -> Topology {
    let gpu = |index: u16| GpuFacts {
        index,
        name: "a GPU".into(),
        uuid: format!("GPU-{index}"),
        memory_bytes: 80 << 30,
        coherent: Some(false),
        pci: PciPlace {
            address: format!("0000:{index}0:00.0"),
            generation: Some(5),
            most_generation: Some(5),
            lanes: Some(16),
            most_lanes: Some(16),
            bridges: Some(vec![format!("0000:0{index}:01.0")]),
            numa_node: Some(0),
            iommu: Some("identity".into()),
        },
    };
    let pairs = (0..4).flat_map(|from| (0..4).map(move |to| (from, to)));
    Topology {
        cuda_version: 13_000,
        gpus: (0..4).map(gpu).collect(),
        pairs: pairs
            .filter(|(from, to)| from != to)
            .map(|(from, to)| Pair { from, to, reaches: true, rank: Some(0) })
            .collect(),
        memory: MemoryFacts {
            transparent: Some(Transparent::Madvise),
            transparent_shared: Some(Transparent::Madvise),
            memlock_bytes: None,
            ..MemoryFacts::default()
        },
        numa_nodes: vec![node(0)],
        processors: 16,
    }
}

fn node(id: u16) -> NumaNode {
    NumaNode { id, total_bytes: Some(1 << 40), free_bytes: Some(1 << 39), usable: true }
}

fn both(gb_per_s: f64) -> BothWays {
    BothWays { h2d_bytes_per_s: gb_per_s * 1e9, d2h_bytes_per_s: gb_per_s * 1e9 }
}

fn measured(links: [f64; 4], together: f64) -> Profile {
    let alone = (0..).zip(links).map(|(gpu, rate)| LinkRate { gpu, rates: both(rate) }).collect();
    Profile::new(good().digest(), alone, both(together), vec![], None)
}

/// What is not as it should be.
fn complaints(host: &Topology, profile: Option<&Profile>) -> Vec<Finding> {
    findings(host, profile).into_iter().filter(|finding| finding.severity > Severity::Ok).collect()
}

#[test]
fn a_host_as_it_should_be_gets_no_complaint() {
    assert_eq!(complaints(&good(), None), []);
    assert_eq!(complaints(&good(), Some(&measured([55.0; 4], 136.0))), []);
    assert_eq!(worst(&findings(&good(), None)), Severity::Ok);
}

#[test]
fn each_thing_that_is_wrong_is_found_and_nothing_else() {
    use Severity::{Fault, Note, Warning};
    type Harm = fn(&mut Topology);
    let table: [(Harm, Severity, &str); 15] = [
        (|host| host.gpus.clear(), Fault, "no GPU"),
        (|host| host.gpus[2].pci.lanes = Some(8), Warning, "GPU 2 has 8 of 16 lanes"),
        (|host| host.gpus[1].pci.generation = Some(1), Note, "GPU 1 runs at generation 1 of 5"),
        (|host| host.gpus[3].pci.lanes = None, Note, "how GPU 3 is connected"),
        (
            |host| host.gpus[3].pci.bridges = host.gpus[1].pci.bridges.clone(),
            Warning,
            "GPUs 1 and 3 share the port 0000:01:01.0",
        ),
        (|host| host.pairs.iter_mut().for_each(|pair| pair.reaches = false), Warning, "no GPU reaches"),
        (|host| host.pairs[0].reaches = false, Warning, "0 to 1"),
        (|host| host.gpus[0].coherent = Some(true), Note, "coherently"),
        (|host| host.gpus[0].pci.iommu = Some("DMA-FQ".into()), Note, "translates the addresses of GPU 0"),
        (|host| host.memory.transparent = Some(Transparent::Never), Warning, "no huge pages"),
        (|host| host.memory.transparent_shared = Some(Transparent::Never), Note, "share has no huge pages"),
        (|host| host.memory.memlock_bytes = Some(65536), Warning, "may lock 65536 bytes"),
        (|host| host.numa_nodes.push(node(1)), Note, "2 NUMA nodes"),
        (
            |host| {
                host.gpus.truncate(1);
                host.pairs.clear();
            },
            Note,
            "one GPU",
        ),
        (
            |host| host.gpus.iter_mut().for_each(|gpu| gpu.pci.lanes = None),
            Note,
            "how GPUs 0, 1, 2 and 3 are connected",
        ),
    ];
    for (harm, severity, words) in table {
        let mut host = good();
        harm(&mut host);
        let found = complaints(&host, None);
        assert_eq!(found.len(), 1, "{words}: {found:?}");
        assert_eq!(found[0].severity, severity, "{found:?}");
        assert!(found[0].what.contains(words), "{found:?} does not say {words:?}");
        assert!(!found[0].why.is_empty());
        assert!(severity < Warning || !found[0].action.is_empty(), "{found:?} does not say what to do");
    }
}

#[test]
fn memory_or_processors_at_the_wrong_socket_are_found() {
    let mut host = good();
    host.numa_nodes = vec![node(0), NumaNode { total_bytes: Some(0), ..node(1) }];
    let found = complaints(&host, None);
    assert_eq!(found[0].severity, Severity::Warning);
    assert!(found[0].what.contains("1 of 2 NUMA nodes have no memory"), "{found:?}");

    host.numa_nodes = vec![node(0), NumaNode { usable: false, ..node(1) }];
    host.gpus[2].pci.numa_node = Some(1);
    host.gpus[3].pci.numa_node = Some(1);
    let found = complaints(&host, None);
    assert!(found[0].what.contains("NUMA node of GPUs 2 and 3"), "{found:?}");
}

#[test]
fn what_was_measured_is_judged_by_the_lanes_and_by_the_other_links() {
    let one = complaints(&good(), Some(&measured([55.0, 55.0, 25.0, 55.0], 136.0)));
    assert!(one.len() == 1 && one[0].what.contains("GPU 2 carries 25.0"), "{one:?}");
    // All are equally slow: only the lanes tell.
    let all = complaints(&good(), Some(&measured([13.0; 4], 50.0)));
    assert!(all.len() == 4 && all[0].what.contains("its lanes have 63.0"), "{all:?}");
    let no_gain = complaints(&good(), Some(&measured([55.0; 4], 56.0)));
    assert!(no_gain.len() == 1 && no_gain[0].what.contains("1.02 times"), "{no_gain:?}");
}

#[test]
fn bytes_that_arrive_wrong_and_rates_that_no_link_has_are_faults() {
    let mut wrong = measured([55.0; 4], 136.0);
    let why = Distrust::WrongBytes { means: Means::Kernel, by: 1, from: 1, to: 3 };
    wrong.untrusted = vec![Untrusted { one: 1, other: 3, why }];
    let mut refused = measured([55.0; 4], 136.0);
    refused.untrusted =
        vec![Untrusted { one: 0, other: 2, why: Distrust::Refused("cuMemAlloc failed".into()) }];
    let mut too_fast = measured([55.0; 4], 136.0);
    too_fast.pairs = vec![
        PairRate { from: 0, to: 1, bytes_per_s: 3277e9 },
        PairRate { from: 1, to: 0, bytes_per_s: 400e9 },
    ];
    for (profile, severity, words) in [
        (wrong, Severity::Fault, "a kernel of GPU 1 moved wrong bytes from GPU 1 to GPU 3"),
        (refused, Severity::Warning, "GPU 0 and GPU 2 do not relay"),
        (too_fast, Severity::Fault, "GPU 0 moved 3277.0 GB/s to GPU 1"),
        (
            measured([55.0, 90.0, 55.0, 55.0], 136.0),
            Severity::Fault,
            "GPU 1 moved 90.0 GB/s where its lanes have 63.0",
        ),
    ] {
        let found = complaints(&good(), Some(&profile));
        assert!(found[0].what.contains(words) && found[0].severity == severity, "{found:?}");
        assert!(!found[0].why.is_empty() && !found[0].action.is_empty());
    }
}

#[test]
fn the_worst_comes_first() {
    let mut host = good();
    host.gpus[1].pci.generation = Some(1);
    host.memory.memlock_bytes = Some(0);
    let severities: Vec<Severity> = findings(&host, None).iter().map(|finding| finding.severity).collect();
    assert!(severities.is_sorted_by(|one, other| one >= other), "{severities:?}");
    assert_eq!(severities[0], Severity::Warning);
}

#[test]
fn no_driver_and_an_old_one_are_faults_that_say_what_to_do() {
    let missing = LoadError::NoLibrary { path: "libcuda.so.1".into(), error: "no such file".into() };
    let old = LoadError::TooOld { version: 12_020, oldest: 12_040 };
    for (error, words) in [(missing, "libcuda.so.1"), (old, "12.2")] {
        let finding = without_driver(&error);
        assert_eq!(finding.severity, Severity::Fault);
        assert!(finding.what.contains(words) && !finding.action.is_empty(), "{finding:?}");
    }
}
