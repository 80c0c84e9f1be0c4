//! `forebay bench disk`: objects of a few sizes, read and written at random places of one preallocated file, through the
//! mover and the disk link with checksums, beside what the same file gives to nothing but io_uring. It knows what is
//! compared with what; how each side does its I/O is theirs.
//!
//! In every run both sides move the same objects, at the same depth, from or into the same memory, one after the other,
//! so that they see the same minute of the machine; which of them goes first alternates. Objects are drawn without
//! repetition from the first half of the file. fio, where it is installed, works on the second half: it leaves no record
//! of what it wrote. CPU time is that of the whole process; on our side it includes the checksums.

mod fio;
mod link;
mod memory;
mod raw;

use super::{Output, finish};
use crate::results::{Peer, Results, Row};
use forebay_links::disk::DiskFile;
use link::Linked;
use memory::{Direction, Objects};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use raw::Raw;
use rustix::time::{ClockId, clock_gettime};
use std::path::PathBuf;
use std::time::Instant;

/// Sizes: name, bytes, and how many are under way at a time: enough to keep the disks of the study busy.
const SIZES: [(&str, u64, usize); 3] =
    [("80kib", 80 << 10, 16), ("128kib", 128 << 10, 16), ("1mib", 1 << 20, 8)];
/// Batches of `depth` objects that our side submits ahead, so that the disk's queue stays full while one is checked.
const BATCHES: usize = 4;
const MIB: u64 = 1 << 20;

/// Arguments of `forebay bench disk`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory on the disk under test; must allow direct I/O
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Runs of each kind
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Size of the file
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(16..=1 << 24))]
    file_mib: u64,
    /// Bytes moved in a run; at most half of the file
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(8..=1 << 24))]
    run_mib: u64,
    #[command(flatten)]
    output: Output,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Runs the benchmark.
pub fn run(args: Args) -> crate::CommandResult {
    let path = args.dir.join(format!("forebay-bench-disk-{}", std::process::id()));
    let file = DiskFile::create(&path, args.file_mib * MIB)?;
    let removed_at_the_end = RemovedWhenDropped(path.clone());
    Linked::new(file, 8)?.fill(args.file_mib * MIB)?;
    let mut results = Results::new("disk");
    for (name, object_bytes, depth) in SIZES {
        let objects = Objects { bytes: object_bytes, depth, slots: BATCHES * depth };
        let figures = measure(&args, &Linked::new(DiskFile::open(&path)?, depth)?, &path, objects)?;
        results.rows.extend(figures.rows(name, objects));
    }
    drop(removed_at_the_end);
    finish(&results, &args.output)
}

/// The file is large, so it goes also when the benchmark fails.
struct RemovedWhenDropped(PathBuf);

impl Drop for RemovedWhenDropped {
    fn drop(&mut self) {
        // There is nobody to tell; the directory is the user's.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What one side did in all runs of one direction.
#[derive(Default)]
struct Side {
    mib_per_s: Vec<f64>,
    cpu_us_per_object: Vec<f64>,
}

/// What was measured in one direction.
#[derive(Default)]
struct Way {
    ours: Side,
    raw: Side,
    fio_mib_per_s: Vec<f64>,
}

#[derive(Default)]
struct Figures {
    read: Way,
    write: Way,
    fio_version: Option<String>,
}

fn measure(
    args: &Args,
    linked: &Linked,
    path: &std::path::Path,
    objects: Objects,
) -> Result<Figures, Failure> {
    let half = args.file_mib * MIB / 2;
    let mut places: Vec<u64> = (0..half / objects.bytes).map(|number| number * objects.bytes).collect();
    let count = places.len().min((args.run_mib * MIB / objects.bytes) as usize);
    let mut session = linked.session(objects)?;
    let mut raw = Raw::open(path, session.memory())?;
    session.store_all(&places)?;
    let mut random = StdRng::seed_from_u64(objects.bytes);
    let mut figures = Figures { fio_version: fio::version(), ..Figures::default() };
    for run in 0..args.runs {
        for direction in [Direction::Write, Direction::Read] {
            places.shuffle(&mut random);
            let places = &places[..count];
            let way = match direction {
                Direction::Read => &mut figures.read,
                Direction::Write => &mut figures.write,
            };
            for turn in 0..2 {
                if turn == run % 2 {
                    let slots = way.raw.time(places.len(), objects, || raw.run(direction, places))?;
                    if direction == Direction::Write {
                        session.note_written(places, &slots);
                    }
                } else {
                    way.ours.time(places.len(), objects, || session.run(direction, places))?;
                }
            }
            if figures.fio_version.is_some() {
                way.fio_mib_per_s.push(fio::mib_per_s(direction, path, objects, half, args.run_mib)?);
            }
        }
    }
    Ok(figures)
}

impl Side {
    fn time<R>(
        &mut self,
        count: usize,
        objects: Objects,
        run: impl FnOnce() -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let (begin, cpu_before_s) = (Instant::now(), cpu_s());
        let outcome = run()?;
        let (wall_s, cpu_s) = (begin.elapsed().as_secs_f64(), cpu_s() - cpu_before_s);
        self.mib_per_s.push((count as u64 * objects.bytes) as f64 / MIB as f64 / wall_s);
        self.cpu_us_per_object.push(cpu_s * 1e6 / count as f64);
        Ok(outcome)
    }

    fn median_cpu_us(&self) -> f64 {
        Row::of_runs("", "", &self.cpu_us_per_object).value
    }

    fn row(&self, name: String, objects: Objects) -> Row {
        let mut row = Row::of_runs(name, "MiB/s", &self.mib_per_s);
        row.cpu_s_per_gb = Some(self.median_cpu_us() * 1e3 / objects.bytes as f64);
        row
    }
}

impl Figures {
    fn rows(&self, name: &str, objects: Objects) -> Vec<Row> {
        let mut rows = Vec::new();
        for (way, verb, raw_verb) in [(&self.read, "retrieve", "read"), (&self.write, "store", "write")] {
            let mut raw = way.raw.row(format!("disk.raw.{raw_verb}.{name}"), objects);
            raw.peer = self.fio_version.as_ref().map(|version| Peer {
                name: "fio".into(),
                version: version.clone(),
                value: Row::of_runs("", "", &way.fio_mib_per_s).value,
            });
            rows.push(way.ours.row(format!("disk.{verb}.{name}"), objects).with_ceiling(raw.value));
            rows.push(raw);
        }
        let ours = [&self.read.ours, &self.write.ours];
        rows.push(cpu_row(format!("disk.cpu_us.{name}"), ours));
        rows.push(cpu_row(format!("disk.raw.cpu_us.{name}"), [&self.read.raw, &self.write.raw]));
        rows
    }
}

/// CPU time per object in the direction that costs more.
fn cpu_row(name: String, sides: [&Side; 2]) -> Row {
    let [read, write] = sides;
    let dearer = if read.median_cpu_us() >= write.median_cpu_us() { read } else { write };
    Row::of_runs(name, "us", &dearer.cpu_us_per_object)
}

/// User and system time of this process so far.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
