//! Judgements over how GPUs are connected: to the processor and to each other.

use super::Severity::{Note, Warning};
use super::{Finding, gpus};
use crate::topology::{GpuFacts, Topology};
use std::collections::BTreeMap;

const RELAYS: &str =
    "a copy for one GPU goes over the links of its peers too, which hand it on over NVLink or PCIe";

pub fn findings(host: &Topology) -> Vec<Finding> {
    let mut all = number(host);
    if host.gpus.iter().any(|gpu| gpu.coherent == Some(true)) {
        let why = "such a link is several times faster than PCIe, so that a way over a peer gains nothing";
        all.push(Finding::new(Note, "the processor and its GPU are joined coherently", why, ""));
    }
    all.extend(host.gpus.iter().filter_map(narrow));
    all.extend(host.gpus.iter().filter_map(slow));
    all.extend(hidden(host));
    all.extend(shared_ports(host));
    all.extend(peers(host));
    all.extend(translated(host));
    all
}

fn number(host: &Topology) -> Vec<Finding> {
    if host.gpus.len() > 1 {
        return vec![Finding::ok(format!("{} GPUs", host.gpus.len()))];
    }
    let action =
        "if the host has more, let this process see them: CUDA_VISIBLE_DEVICES, the container's devices";
    vec![Finding::new(Note, "this process sees one GPU", RELAYS, action)]
}

/// Fewer lanes than there could be.
fn narrow(gpu: &GpuFacts) -> Option<Finding> {
    let (lanes, most) = (gpu.pci.lanes?, gpu.pci.most_lanes?);
    (lanes < most).then(|| {
        let what = format!("the link of GPU {} has {lanes} of {most} lanes", gpu.index);
        let why = "it carries that much less, for its own copies and as a way to others";
        let action = "reseat the card or riser; look for lane bifurcation in the firmware's settings";
        Finding::new(Warning, what, why, action)
    })
}

/// A lower generation than there could be. It proves nothing while the GPU is idle.
fn slow(gpu: &GpuFacts) -> Option<Finding> {
    let (now, most) = (gpu.pci.generation?, gpu.pci.most_generation?);
    (now < most).then(|| {
        let what = format!("the link of GPU {} runs at generation {now} of {most}", gpu.index);
        let why =
            "each generation halves what the next one carries; some GPUs go down to save power while idle";
        let action =
            "look again while the GPU works; if it stays, look at the slot and the firmware's settings";
        Finding::new(Note, what, why, action)
    })
}

/// Links that the system says nothing of.
fn hidden(host: &Topology) -> Option<Finding> {
    let unknown = |gpu: &&GpuFacts| gpu.pci.lanes.is_none() || gpu.pci.generation.is_none();
    let hidden: Vec<u16> = host.gpus.iter().filter(unknown).map(|gpu| gpu.index).collect();
    (!hidden.is_empty()).then(|| {
        let be = if hidden.len() == 1 { "is" } else { "are" };
        let what = format!("the system does not tell how {} {be} connected", gpus(&hidden));
        let why =
            "virtual machines hide lanes, generation and switches; only measuring shows what the links carry";
        Finding::new(Note, what, why, "")
    })
}

/// GPUs behind one port of the processor.
fn shared_ports(host: &Topology) -> Vec<Finding> {
    let mut behind: BTreeMap<&str, Vec<u16>> = BTreeMap::new();
    for gpu in &host.gpus {
        if let Some(port) = gpu.pci.port() {
            behind.entry(port).or_default().push(gpu.index);
        }
    }
    let shared = behind.into_iter().filter(|(_, behind)| behind.len() > 1);
    shared
        .map(|(port, behind)| {
            let what = format!("{} share the port {port}", gpus(&behind));
            let why = "they share its bandwidth, so that going over one of them gains nothing for another";
            Finding::new(Warning, what, why, "plug them in at ports of their own where the host has some")
        })
        .collect()
}

/// GPUs that do not reach each other.
fn peers(host: &Topology) -> Option<Finding> {
    let apart: Vec<(u16, u16)> =
        host.pairs.iter().filter(|pair| !pair.reaches).map(|pair| (pair.from, pair.to)).collect();
    let action = "check the IOMMU and ACS settings, virtual machines' GPU passthrough, and that nvidia-fabricmanager runs";
    if apart.is_empty() {
        return (!host.pairs.is_empty()).then(|| Finding::ok("every GPU reaches the memory of every other"));
    }
    if apart.len() == host.pairs.len() {
        let what = "no GPU reaches the memory of another";
        return Some(Finding::new(Warning, what, RELAYS, action));
    }
    let pairs: Vec<String> = apart.iter().map(|(from, to)| format!("{from} to {to}")).collect();
    let what = format!("some GPUs do not reach the memory of others: {}", pairs.join(", "));
    Some(Finding::new(Warning, what, RELAYS, action))
}

/// GPUs whose every address the IOMMU translates.
fn translated(host: &Topology) -> Option<Finding> {
    let is_translated =
        |gpu: &&GpuFacts| gpu.pci.iommu.as_deref().is_some_and(|kind| kind.starts_with("DMA"));
    let translated: Vec<u16> = host.gpus.iter().filter(is_translated).map(|gpu| gpu.index).collect();
    (!translated.is_empty()).then(|| {
        let what = format!("the IOMMU translates the addresses of {}", gpus(&translated));
        let why = "pinning takes longer, and copies between GPUs over PCIe go through the processor";
        Finding::new(Note, what, why, "where no isolation is needed: iommu=pt on the kernel's command line")
    })
}
