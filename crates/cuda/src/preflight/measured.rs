//! Judgements over what was measured.

use super::Finding;
use super::Severity::{Fault, Warning};
use crate::peers::{ADVICE, Distrust, Untrusted};
use crate::profile::{BothWays, PairRate, Profile};
use crate::topology::{GpuFacts, PciPlace, Topology};

/// A link that carries less than this part of what its lanes could, or of what the best link
/// carries, is a slow one.
const SLOW: f64 = 0.7;
/// All links together have to carry this much more than one for a way over peers to be worth it.
const WORTH: f64 = 1.2;
/// A rate that is so many times what the lanes have was not one of bytes that arrived.
const IMPOSSIBLE: f64 = 1.1;
/// No link from one GPU to another carries more in one direction, NVLink of the sixth generation
/// included (1.8 TB/s).
const PAIR_BYTES_PER_S_MAX: f64 = 2e12;

pub fn findings(host: &Topology, profile: &Profile) -> Vec<Finding> {
    let mut all: Vec<Finding> = profile.untrusted.iter().map(untrusted).collect();
    all.extend(host.gpus.iter().filter_map(|gpu| impossible(gpu, profile)));
    all.extend(profile.pairs.iter().filter_map(impossible_pair));
    all.extend(host.gpus.iter().filter_map(|gpu| slow(gpu, profile)));
    if host.gpus.len() > 1 {
        all.extend(gain(profile));
    }
    all
}

/// GPUs that move wrong bytes to each other.
fn untrusted(pair: &Untrusted) -> Finding {
    match pair.why {
        Distrust::Refused(_) => {
            let why = "a copy for one of them does not go over the link of the other";
            Finding::new(Warning, pair.to_string(), why, "see what the kernel's log says of these GPUs")
        }
        _ => {
            let why =
                "programs that copy between them get wrong bytes and no error; Forebay does not go over them";
            Finding::new(Fault, pair.to_string(), why, ADVICE)
        }
    }
}

/// A link that moved more than there is room for.
fn impossible(gpu: &GpuFacts, profile: &Profile) -> Option<Finding> {
    let (measured, wire) = (profile.alone(gpu.index)?, wire_bytes_per_s(&gpu.pci)?);
    let rate = measured.h2d_bytes_per_s.max(measured.d2h_bytes_per_s);
    (rate > IMPOSSIBLE * wire).then(|| {
        let (index, rate, wire) = (gpu.index, rate / 1e9, wire / 1e9);
        too_fast(format!("the link of GPU {index} moved {rate:.1} GB/s where its lanes have {wire:.1}"))
    })
}

/// The same from GPU to GPU.
fn impossible_pair(pair: &PairRate) -> Option<Finding> {
    (pair.bytes_per_s > PAIR_BYTES_PER_S_MAX).then(|| {
        let PairRate { from, to, bytes_per_s } = pair;
        let most = PAIR_BYTES_PER_S_MAX / 1e9;
        let rate = bytes_per_s / 1e9;
        too_fast(format!("GPU {from} moved {rate:.1} GB/s to GPU {to} where no link has more than {most:.0}"))
    })
}

fn too_fast(what: String) -> Finding {
    let why = "the driver reports success for what was not moved, so copies may be wrong without an error";
    Finding::new(Fault, what, why, ADVICE)
}

/// A link that carries less than it could, or than others do.
fn slow(gpu: &GpuFacts, profile: &Profile) -> Option<Finding> {
    let measured = profile.alone(gpu.index)?;
    let best = profile.alone.iter().map(|link| slower_way(&link.rates)).fold(0.0, f64::max);
    let wire = wire_bytes_per_s(&gpu.pci).unwrap_or(0.0);
    let (rate, expected) = (slower_way(&measured), best.max(wire));
    (rate < SLOW * expected).then(|| {
        let what = format!(
            "the link of GPU {} carries {:.1} GB/s where {} {:.1}",
            gpu.index,
            rate / 1e9,
            if wire > best { "its lanes have" } else { "the best one carries" },
            expected / 1e9
        );
        let why = "its own copies are that much slower, and so is every other GPU's that goes over it";
        let action =
            "look at its lanes and generation under load, its NUMA node, and what else used it meanwhile";
        Finding::new(Warning, what, why, action)
    })
}

/// What one GPU gains from the links of all.
fn gain(profile: &Profile) -> Option<Finding> {
    let best = profile.alone.iter().map(|link| link.rates).reduce(|one, other| BothWays {
        h2d_bytes_per_s: one.h2d_bytes_per_s.max(other.h2d_bytes_per_s),
        d2h_bytes_per_s: one.d2h_bytes_per_s.max(other.d2h_bytes_per_s),
    })?;
    let h2d = profile.together.h2d_bytes_per_s / best.h2d_bytes_per_s;
    let d2h = profile.together.d2h_bytes_per_s / best.d2h_bytes_per_s;
    if h2d.max(d2h) < WORTH {
        let what = format!("all links together carry {:.2} times what one does", h2d.max(d2h));
        let why = "a copy for one GPU gains nothing from the links of its peers";
        let action = "look for a shared port or switch, and for memory that is all at one socket";
        return Some(Finding::new(Warning, what, why, action));
    }
    Some(Finding::ok(format!(
        "all links together carry {h2d:.2} times what one does to a GPU, {d2h:.2} from one"
    )))
}

fn slower_way(rates: &BothWays) -> f64 {
    rates.h2d_bytes_per_s.min(rates.d2h_bytes_per_s)
}

/// What the device's lanes carry at its highest generation, headers included. Idle GPUs show a
/// lower one.
fn wire_bytes_per_s(pci: &PciPlace) -> Option<f64> {
    let lane = match pci.most_generation? {
        1 => 0.25e9,
        2 => 0.5e9,
        3 => 0.985e9,
        4 => 1.969e9,
        5 => 3.938e9,
        6 => 7.563e9,
        _ => return None,
    };
    Some(lane * f64::from(pci.lanes?))
}
