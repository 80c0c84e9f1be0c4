//! `forebay store stat` and `verify`: what a log holds, and whether all of it is as it was written.
//! Neither changes it.

use super::show::{Size, in_file};
use forebay_results::output::CommandResult;
use forebay_store::log::{ChunkFault, ChunkInLog, Inspection, Medium, Verified, VolumeSpace, inspect};
use forebay_store::ssd::FileMedium;
use serde_json::{Value, json};
use std::path::Path;

/// Shows what a log holds.
pub fn stat(file: &Path, as_json: bool) -> CommandResult {
    let medium = FileMedium::open_read_only(file)?;
    let seen = inspect(&medium, |_| ()).map_err(|error| in_file(file, error))?;
    let space = medium.space()?;
    if as_json {
        println!("{:#}", value(&seen, &space));
    } else {
        print(file, &seen, &space);
    }
    Ok(())
}

/// Checks every layer of every chunk.
pub fn verify(file: &Path) -> CommandResult {
    let medium = FileMedium::open_read_only(file)?;
    let found = forebay_store::log::verify(&medium).map_err(|error| in_file(file, error))?;
    print_verified(file, &found);
    if found.is_sound() {
        return Ok(());
    }
    Err(format!(
        "{}: damaged; `forebay store scrub` drops what is, so that it is a miss and never data",
        file.display()
    )
    .into())
}

/// Prints what checking a log found.
pub fn print_verified(file: &Path, found: &Verified) {
    let Inspection { recovered, both_superblocks, .. } = &found.inspection;
    let sound = recovered.chunks - found.faults.len() as u64;
    println!("{}: {sound} chunks are sound, {} of layers", file.display(), Size(found.sound_bytes));
    if !both_superblocks {
        println!("one of the two superblocks is damaged");
    }
    if recovered.lost > 0 {
        println!(
            "{} chunks can neither be named nor read: their segments' headers or footers are damaged",
            recovered.lost
        );
    }
    if !found.faults.is_empty() {
        println!("{:>8} {:>6} {:>6}  {:64}  fault", "segment", "slot", "tenant", "chunk");
    }
    found.faults.iter().for_each(print_fault);
}

fn print_fault((chunk, fault): &(ChunkInLog, ChunkFault)) {
    let ChunkInLog { copy, tenant, .. } = chunk;
    let id: String = copy.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{:>8} {:>6} {:>6}  {id}  {fault}", copy.segment, copy.slot, tenant.0);
}

fn print(file: &Path, seen: &Inspection, space: &VolumeSpace) {
    let Inspection { layout, segments, recovered, .. } = seen;
    let state =
        if recovered.clean { "closed in good order" } else { "not closed: the next open recovers it" };
    println!("{}", file.display());
    println!("log         {:?}, epoch {}, {state}", seen.log, seen.epoch);
    println!("size        {}, {} on disk", Size(layout.file_bytes), Size(space.held_bytes));
    println!(
        "segments    {} of {}: {} free, {} open, {} sealed, {} given back to the file system",
        layout.segments,
        Size(layout.segment_bytes),
        segments.free,
        segments.open,
        segments.sealed,
        segments.withdrawn
    );
    println!("checkpoint  {}, and {} journal blocks since", seen.checkpoint, recovered.blocks_replayed);
    println!("chunks      {}", recovered.chunks);
    if recovered.salvaged + recovered.lost > 0 {
        println!("            {} found without a record, {} lost", recovered.salvaged, recovered.lost);
    }
    for (tenant, held) in &seen.tenants {
        println!(
            "tenant {:<5}{} chunks, {} of layers in {} of slots",
            tenant.0,
            held.chunks,
            Size(held.bytes),
            Size(held.slot_bytes)
        );
    }
    for tenant in &seen.doomed {
        println!("tenant {:<5}gone; its bytes are still being overwritten", tenant.0);
    }
}

fn value(seen: &Inspection, space: &VolumeSpace) -> Value {
    let Inspection { layout, segments, recovered, .. } = seen;
    let tenant = |(tenant, held): (&forebay_store::TenantId, &forebay_store::log::TenantInLog)| json!({"tenant": tenant.0, "chunks": held.chunks, "bytes": held.bytes, "slot_bytes": held.slot_bytes});
    json!({
        "log": format!("{:?}", seen.log),
        "format_version": forebay_store::log::FORMAT_VERSION,
        "epoch": seen.epoch,
        "clean": recovered.clean,
        "both_superblocks": seen.both_superblocks,
        "file_bytes": layout.file_bytes,
        "held_bytes": space.held_bytes,
        "segment_bytes": layout.segment_bytes,
        "segments": {
            "free": segments.free, "open": segments.open, "sealed": segments.sealed, "withdrawn": segments.withdrawn
        },
        "checkpoint": seen.checkpoint,
        "blocks_replayed": recovered.blocks_replayed,
        "footers_read": recovered.footers_read,
        "chunks": recovered.chunks,
        "salvaged": recovered.salvaged,
        "lost": recovered.lost,
        "tenants": seen.tenants.iter().map(tenant).collect::<Vec<_>>(),
        "doomed": seen.doomed.iter().map(|tenant| tenant.0).collect::<Vec<_>>(),
    })
}
