//! `forebay store`: make, look at, check and empty logs of the SSD tier while no engine uses them.
//! It turns arguments into calls of `forebay-store`, and what came back into text; what a log is,
//! is known there.

mod change;
mod look;
mod show;

use clap::Subcommand;
use forebay_results::output::{CommandResult, Error};
use forebay_store::TenantId;
use forebay_store::ssd::{Existing, SsdError, init};
use show::{Size, in_file};
use std::path::{Path, PathBuf};

/// Arguments of `forebay store`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make an empty log, with all its space set aside
    Init {
        /// File to make, or raw partition to use
        file: PathBuf,
        /// Size of the log, such as 100G; it never takes more of the disk
        #[arg(long, value_name = "SIZE", value_parser = super::values::size::<u64>)]
        size: u64,
        /// Size of a segment; no chunk may be larger
        #[arg(long, value_name = "SIZE", value_parser = super::values::size::<u64>, default_value = "256M")]
        segment: u64,
        /// Destroy what the file or partition holds
        #[arg(long)]
        force: bool,
    },
    /// Show what a log holds, without changing it
    Stat {
        /// The log
        file: PathBuf,
        /// Print it as JSON
        #[arg(long)]
        json: bool,
    },
    /// Read all of a log and check every checksum, without changing it; fails if one is wrong
    Verify {
        /// The log
        file: PathBuf,
    },
    /// Check a log as verify does, and drop the chunks that are damaged, so that they are misses
    Scrub {
        /// The log
        file: PathBuf,
    },
    /// Drop all chunks of a tenant and overwrite their bytes
    Purge {
        /// The log
        file: PathBuf,
        /// Number of the tenant
        #[arg(long, value_name = "NUMBER")]
        tenant: u16,
    },
    /// Rebuild a log that lost both checkpoints from its segments
    Recover {
        /// The log
        file: PathBuf,
        /// Overwrite with zeros the pages that the disk cannot read ("the disk failed at offset")
        /// and without which the log does not open, each tried four times; what they held is lost.
        /// Then rebuild only if that is needed
        #[arg(long)]
        unreadable: bool,
    },
}

pub fn run(args: Args) -> CommandResult {
    match args.command {
        Command::Init { file, size, segment, force } => make(&file, size, segment, force),
        Command::Stat { file, json } => look::stat(&file, json),
        Command::Verify { file } => look::verify(&file),
        Command::Scrub { file } => change::scrub(&file),
        Command::Purge { file, tenant } => change::purge(&file, TenantId(tenant)),
        Command::Recover { file, unreadable: false } => change::recover(&file),
        Command::Recover { file, unreadable: true } => change::give_up(&file),
    }
}

fn make(file: &Path, bytes: u64, segment_bytes: u64, force: bool) -> CommandResult {
    let existing = if force { Existing::Destroy } else { Existing::Keep };
    let log = init(file, bytes, segment_bytes, existing).map_err(|error| match error {
        SsdError::Exists { path } => {
            format!("{}: exists already; --force destroys what it holds", path.display()).into()
        }
        SsdError::Layout(error) => in_file(file, error),
        other => Error::from(other),
    })?;
    println!("{}: log {log:?} of {} in segments of {}", file.display(), Size(bytes), Size(segment_bytes));
    Ok(())
}
