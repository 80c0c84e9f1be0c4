//! Counts commands at QEMU's controller: `count [--json FILE]`. Random data are written in one
//! shape and read in another; rows are the commands, and those of round trips that went wrong. How
//! long they take says nothing about a drive, so no rate is told.

use forebay_results::{Results, Row};
use forebay_ring::nvme::Format;
use qemu_nvme::{Drive, Place, Settings, round_trip};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::path::PathBuf;

const ROUND_TRIPS: u64 = 5_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let json = json_file()?;
    let mut results = Results::new("nvme-qemu");
    let mut drive = Drive::start(&Settings::default())?;
    let mut queue = drive.add_queue(64);
    let blocks = drive.namespace.blocks;
    let place = Place::new(&mut drive, 0..blocks);
    let formats = [Format::Prp, Format::Sgl];
    let mut bad = 0;
    for seed in 0..ROUND_TRIPS {
        let of_both = [formats[seed as usize & 1], formats[seed as usize >> 1 & 1]];
        let mut rng = StdRng::seed_from_u64(seed);
        if let Err(what) = round_trip(&mut queue, &mut rng, &place, of_both) {
            eprintln!("round trip {seed}: {what}");
            // Both of its commands: which of the two was wrong is not known.
            bad += 2;
        }
    }
    results.disk(format!("NVMe controller of {} under TCG", drive.version()?));
    let counts = [("commands", 2 * ROUND_TRIPS), ("bad", bad)];
    for (name, count) in counts {
        println!("nvme.qemu.{name}: {count}");
        results.rows.push(Row::of_runs(format!("nvme.qemu.{name}"), "commands", &[count as f64]));
    }
    match json {
        Some(file) => Ok(results.write(&file)?),
        None => Ok(()),
    }
}

/// The file after `--json`.
fn json_file() -> Result<Option<PathBuf>, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => Ok(None),
        ["--json", file] => Ok(Some(file.into())),
        _ => Err(format!("usage: count [--json FILE]; arguments are {arguments:?}")),
    }
}
