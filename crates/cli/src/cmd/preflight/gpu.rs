//! `forebay preflight gpu`: whether a host is fit for fast copies, before anything depends on it.
//! This file knows how a host is shown; what is found is `forebay-cuda`'s to say.

use crate::cmd::findings;
use forebay_cuda::By;
use forebay_cuda::driver::Driver;
use forebay_cuda::preflight::{self, Finding, Severity, without_driver, worst};
use forebay_cuda::profile::{Profile, Relayed};
use forebay_cuda::topology::{GpuFacts, MemoryFacts, Topology, Transparent};
use forebay_results::output::Error;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Write all figures and findings to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// First measure the links, and copies over them, for about 3 seconds, and keep the figures
    /// for all programs that copy
    #[arg(long)]
    measure: bool,
}

/// Runs the command. The exit code is the worst finding's.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let Args { json, measure } = args;
    let seen = Driver::load().and_then(|driver| Ok((driver, Topology::read(driver)?)));
    let (driver, host) = match seen {
        Ok(seen) => seen,
        Err(error) => {
            let finding = without_driver(&error);
            println!("fault: {}: {}", finding.what, finding.action);
            write(json.as_deref(), None, None, &[finding])?;
            return Ok(findings::exit_code(Severity::Fault));
        }
    };
    let profile = match measure && !host.gpus.is_empty() {
        true => Some(measured(driver, &host)?),
        false => Profile::kept(driver),
    };
    let found = preflight::findings(&host, profile.as_ref());
    print_host(&host);
    if let Some(profile) = &profile {
        print_profile(profile);
    }
    println!();
    found.iter().for_each(|finding| findings::print(None, finding));
    write(json.as_deref(), Some(&host), profile.as_ref(), &found)?;
    Ok(findings::exit_code(worst(&found)))
}

/// Measures, and keeps what was measured.
fn measured(driver: &'static Driver, host: &Topology) -> Result<Profile, Error> {
    let profile = forebay_cuda::measure::measure(driver, host)?;
    let folder =
        Profile::folder().ok_or("the figures are not kept: neither XDG_CACHE_HOME nor HOME is set")?;
    let failed = |error| format!("the figures are not kept: {}: {error}", folder.display());
    profile.save(&folder).map_err(failed)?;
    Ok(profile)
}

fn print_host(host: &Topology) {
    let MemoryFacts { total_bytes, available_bytes, memlock_bytes, .. } = host.memory;
    println!("driver      CUDA {}.{}", host.cuda_version / 1000, host.cuda_version % 1000 / 10);
    println!("memory      {} of {} available", gigabytes(available_bytes), gigabytes(total_bytes));
    println!("pages       {}", pages(&host.memory));
    println!(
        "may lock    {}",
        memlock_bytes.map_or("without limit".into(), |bytes| format!("{bytes} bytes"))
    );
    let nodes: Vec<String> = host.numa_nodes.iter().map(|node| node.id.to_string()).collect();
    println!("NUMA nodes  {}", if nodes.is_empty() { "unknown".into() } else { nodes.join(" ") });
    println!("processors  {}", host.processors);
    println!();
    println!(
        "{:<4} {:<24} {:>9}  {:<13} {:<18} {:<13} {:<8} reaches",
        "GPU", "name", "memory", "PCI address", "link", "port", "node"
    );
    host.gpus.iter().for_each(|gpu| print_gpu(gpu, host));
}

fn print_gpu(gpu: &GpuFacts, host: &Topology) {
    let GpuFacts { index, name, memory_bytes, pci, .. } = gpu;
    let reached = host.pairs.iter().filter(|pair| pair.from == *index && pair.reaches);
    let reached: Vec<String> = reached.map(|pair| pair.to.to_string()).collect();
    println!(
        "{:<4} {:<24} {:>9}  {:<13} {:<18} {:<13} {:<8} {}",
        index,
        name,
        gigabytes(Some(*memory_bytes)),
        pci.address,
        link(gpu),
        if pci.bridges.as_ref().is_some_and(Vec::is_empty) {
            "none"
        } else {
            pci.port().unwrap_or("unknown")
        },
        pci.numa_node.map_or("unknown".into(), |node| node.to_string()),
        if reached.is_empty() { "none".into() } else { reached.join(" ") }
    );
}

/// Generation and lanes, now and at most.
fn link(gpu: &GpuFacts) -> String {
    let of = |now: Option<u8>, most: Option<u8>| match (now, most) {
        (Some(now), Some(most)) if now != most => format!("{now} of {most}"),
        (Some(now), _) => now.to_string(),
        (None, _) => "unknown".into(),
    };
    let pci = &gpu.pci;
    match (pci.generation, pci.lanes) {
        (None, None) => "unknown".into(),
        _ => format!("gen {}, x{}", of(pci.generation, pci.most_generation), of(pci.lanes, pci.most_lanes)),
    }
}

fn pages(memory: &MemoryFacts) -> String {
    let transparent = match memory.transparent {
        Some(Transparent::Always) => "huge ones without asking",
        Some(Transparent::Madvise) => "huge ones on request",
        Some(Transparent::Never) => "no huge ones but reserved ones",
        None => "unknown whether there are huge ones",
    };
    match (memory.huge_pages, memory.huge_pages_free) {
        (Some(all), Some(free)) if all > 0 => {
            format!("{transparent}; {free} of {all} reserved ones are free")
        }
        _ => format!("{transparent}; none reserved"),
    }
}

fn print_profile(profile: &Profile) {
    println!();
    println!("{:<10} {:>14} {:>14}   GB/s, as measured", "link", "to the GPU", "from the GPU");
    let rows = profile.alone.iter().map(|link| (format!("GPU {}", link.gpu), link.rates));
    for (name, rates) in rows.chain([("all".into(), profile.together)]) {
        let (h2d, d2h) = (rates.h2d_bytes_per_s / 1e9, rates.d2h_bytes_per_s / 1e9);
        println!("{name:<10} {h2d:>14.1} {d2h:>14.1}");
    }
    for pair in &profile.pairs {
        println!("{:<10} {:>14.1}", format!("{} > {}", pair.from, pair.to), pair.bytes_per_s / 1e9);
    }
    match &profile.relayed {
        Some(relayed) => {
            print_relayed("to a GPU", &relayed.h2d);
            print_relayed("from a GPU", &relayed.d2h);
        }
        None if profile.untrusted.is_empty() => {
            println!("no GPU reaches another, so that copies have one path each");
        }
        None => println!("no GPU relays for another, so that copies have one path each"),
    }
}

fn print_relayed(way: &str, relayed: &Relayed) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let Some(least) = relayed.break_even_bytes else {
        println!("{way}: several paths do not pay");
        return;
    };
    println!(
        "{way}: several paths pay from {:.1} MiB on; a relay is {:.0} us late and carries {:.2} of its link",
        mib(least),
        relayed.relaying.latency_s * 1e6,
        relayed.relaying.efficiency,
    );
    if relayed.mover_bytes < u64::MAX {
        let by = match relayed.relay.staged {
            By::Own => "the GPU's own copy engine",
            By::Peer => "its peers' copy engines",
            By::Kernel => "a kernel of the GPU",
        };
        let from = mib(relayed.mover_bytes);
        println!(
            "{way}: copies that are waited for are shared out as they go from {from:.0} MiB on, by {by}"
        );
    }
}

fn gigabytes(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |bytes| format!("{:.1} GB", bytes as f64 / 1e9))
}

fn write(
    file: Option<&Path>,
    host: Option<&Topology>,
    profile: Option<&Profile>,
    found: &[Finding],
) -> Result<(), Error> {
    let Some(file) = file else { return Ok(()) };
    let all = json!({"severity": worst(found), "findings": found, "host": host, "measured": profile});
    findings::write(file, &all)
}
