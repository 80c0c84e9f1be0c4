//! Has a GPU drive QEMU's controller and ours: `gpu [--commands N] [--json FILE]`. Random pages are
//! written and read, and compared by checksums that the GPU makes. How long this takes says nothing
//! about a drive.

use clap::Parser;
use forebay_cuda::device::Device;
use forebay_cuda::driver::Driver;
use forebay_results::{Results, Row};
use qemu_nvme::{Counts, Drive, GpuDriver, GuestMemory, QueuePlaces, Settings, SoftDrive};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const ENTRIES: u16 = 64;
/// Room for the areas of as many transfers, beside the queues.
const MEMORY_BYTES: usize = 64 << 20;

#[derive(Parser)]
struct Args {
    /// Commands for each controller
    #[arg(long, default_value_t = 100_000)]
    commands: u64,
    /// Write the results object to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let device = Device::open(Driver::load()?, 0)?;
    let mut results = Results::new("nvme-gpu");
    results.gpus(vec![device.name()?]);

    let ours = SoftDrive::start(MEMORY_BYTES, 1 << 15, ENTRIES)?;
    let of = (ours.memory(), ours.queues(), ours.free());
    results.rows.extend(rows("nvme.soft.gpu", &device, of, args.commands)?);

    let mut drive = Drive::start(&Settings { memory_bytes: MEMORY_BYTES, ..Settings::default() })?;
    results.disk(format!("NVMe controller of {} under TCG, and ours", drive.version()?));
    let queues = drive.add_queue::<()>(ENTRIES).places();
    let areas = drive.take(0);
    results.rows.extend(rows("nvme.qemu.gpu", &device, (drive.memory(), queues, areas), args.commands)?);
    match args.json {
        Some(file) => Ok(results.write(&file)?),
        None => Ok(()),
    }
}

fn rows(
    name: &str,
    device: &Arc<Device>,
    (memory, queues, areas): (&GuestMemory, QueuePlaces, u64),
    commands: u64,
) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let mut gpu = GpuDriver::new(device, memory, queues, areas)?;
    let since = Instant::now();
    let Counts { commands, bad } = gpu.round_trips(commands, 1)?;
    println!("{name}: {commands} commands, {bad} bad, {:.1} s", since.elapsed().as_secs_f64());
    let row = |of: &str, count: u64| Row::of_runs(format!("{name}.{of}"), "commands", &[count as f64]);
    Ok(vec![row("commands", commands), row("bad", bad)])
}
