//! `forebay store scrub`, `purge` and `recover`: what changes a log while no engine uses it. Each
//! leaves a log that was closed in good order, or, if it is stopped half-way, one that the next
//! open recovers.

use super::look::print_verified;
use super::show::in_file;
use forebay_results::output::{CommandResult, Error};
use forebay_store::TenantId;
use forebay_store::log::{
    DiskTierConfig, GivenUp, Inspection, Medium, Offline, Rebuilt, give_up_unreadable, inspect, rebuild,
    verify,
};
use forebay_store::ssd::FileMedium;
use std::path::Path;

/// What is to be known when a checkpoint or the journal is lost.
const DELETIONS_FORGOTTEN: &str =
    "chunks that were deleted lately may be back; purge tenants that are to be gone once more";

/// Checks everything and drops what is damaged.
pub fn scrub(file: &Path) -> CommandResult {
    let medium = FileMedium::open(file)?;
    let found = verify(&medium).map_err(|error| in_file(file, error))?;
    print_verified(file, &found);
    if found.is_sound() {
        return Ok(());
    }
    let mut log = opened(file, &medium, &found.inspection)?;
    // A damaged copy may be an older one of a chunk that has a newer, sound one.
    let dropped = found.faults.iter().filter(|(chunk, _)| log.drop_copy(chunk.tenant, &chunk.copy)).count();
    log.close().map_err(|error| in_file(file, error))?;
    println!("{dropped} chunks were dropped");
    Ok(())
}

/// Drops all chunks of a tenant and overwrites what they leave.
pub fn purge(file: &Path, tenant: TenantId) -> CommandResult {
    let medium = FileMedium::open(file)?;
    let seen = inspect(&medium, |_| ()).map_err(|error| in_file(file, error))?;
    let mut log = opened(file, &medium, &seen)?;
    let gone = log.purge(tenant).map_err(|error| in_file(file, error))?;
    log.close().map_err(|error| in_file(file, error))?;
    println!("{}: {gone} chunks of tenant {} are gone, their bytes overwritten", file.display(), tenant.0);
    Ok(())
}

/// Rebuilds a log that has no checkpoint.
pub fn recover(file: &Path) -> CommandResult {
    let medium = FileMedium::open(file)?;
    let rebuilt = rebuild(&medium).map_err(|error| in_file(file, error))?;
    print_rebuilt(file, &rebuilt);
    println!("{DELETIONS_FORGOTTEN}");
    Ok(())
}

/// Gives up pages that can never be read, each of which is told at once, whatever comes after it.
pub fn give_up(file: &Path) -> CommandResult {
    let medium = FileMedium::open(file)?;
    let (mut given_up, mut knew_deletions) = (0, false);
    let reopened = give_up_unreadable(&medium, |GivenUp { offset, was }| {
        println!("{}: gave up the page at offset {offset}, {was}: {}", file.display(), was.loss());
        given_up += 1;
        knew_deletions |= was.knew_deletions();
    })
    .map_err(|error| in_file(file, error))?;
    if let Some(rebuilt) = &reopened.rebuilt {
        print_rebuilt(file, rebuilt);
    }
    if knew_deletions || reopened.rebuilt.is_some() {
        println!("{DELETIONS_FORGOTTEN}");
    }
    let chunks = reopened.inspection.recovered.chunks;
    println!("{}: {given_up} pages were given up; the log opens, with {chunks} chunks", file.display());
    Ok(())
}

fn print_rebuilt(file: &Path, rebuilt: &Rebuilt) {
    let Rebuilt { segments, chunks, blocks } = rebuilt;
    println!(
        "{}: rebuilt from {segments} segments and {blocks} journal blocks, {chunks} chunks",
        file.display()
    );
}

/// Opens a log with room for all the chunks that it holds.
fn opened<'a>(file: &Path, medium: &'a dyn Medium, seen: &Inspection) -> Result<Offline<'a>, Error> {
    let max_chunks = u32::try_from(seen.recovered.chunks.saturating_add(1)).unwrap_or(u32::MAX);
    let config = DiskTierConfig { max_chunks, ..DiskTierConfig::default() };
    let (log, _) = Offline::open(&config, medium).map_err(|error| in_file(file, error))?;
    Ok(log)
}
