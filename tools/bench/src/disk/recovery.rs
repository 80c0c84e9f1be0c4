//! How long a log with millions of chunks takes to open after its process was killed, and what its
//! index takes in memory. This file knows clocks and sizes; what the log looks like is `image`'s to
//! say.

use super::image;
use crate::output::Error;
use forebay_results::Row;
use forebay_store::log::{DiskTier, DiskTierConfig, Medium};
use forebay_store::ssd::FileMedium;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::path::Path;
use std::time::Instant;

const LAYER_BYTES: u64 = 80 << 10;

/// Opens a log of so many chunks again and again.
pub fn rows(dir: &Path, chunks: u32, runs: u32) -> Result<Vec<Row>, Error> {
    let path = dir.join(format!("forebay-bench-recovery-{}", std::process::id()));
    let image = image::make(&path, chunks.into(), LAYER_BYTES)?;
    let (mut seconds, mut index_bytes, mut resident_bytes) = (Vec::new(), 0, 0);
    for run in 0..runs {
        leave_page_cache(&image)?;
        let medium = FileMedium::open(&image)?;
        let before_bytes = resident()?;
        let begin = Instant::now();
        let config = DiskTierConfig { max_chunks: chunks, ..DiskTierConfig::default() };
        let media: [&dyn Medium; 1] = [&medium];
        let (tier, _) = DiskTier::open(&config, &media)?;
        seconds.push(begin.elapsed().as_secs_f64());
        let stat = tier.stat();
        if stat.chunks != chunks as usize {
            return Err(format!("{} of {chunks} chunks were recovered", stat.chunks).into());
        }
        index_bytes = stat.index_bytes + stat.slot_table_bytes;
        if run == 0 {
            // Later, memory that was freed is used again, and the difference says nothing.
            resident_bytes = resident()?.saturating_sub(before_bytes);
        }
    }
    let per_chunk = |bytes: u64| [bytes as f64 / f64::from(chunks)];
    Ok(vec![
        Row::of_runs(format!("disk.recovery_s.{}", short(chunks)), "s", &seconds),
        Row::of_runs("disk.index_bytes_per_chunk", "B", &per_chunk(index_bytes)),
        Row::of_runs("disk.index_resident_bytes_per_chunk", "B", &per_chunk(resident_bytes)),
    ])
}

fn leave_page_cache(path: &Path) -> Result<(), Error> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Bytes of memory that this process has in use.
fn resident() -> Result<u64, Error> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.ok_or("/proc/self/status does not say VmRSS in kB")? * 1024)
}

/// 10m for ten million.
fn short(chunks: u32) -> String {
    match chunks {
        _ if chunks.is_multiple_of(1_000_000) => format!("{}m", chunks / 1_000_000),
        _ if chunks.is_multiple_of(1_000) => format!("{}k", chunks / 1_000),
        _ => chunks.to_string(),
    }
}
