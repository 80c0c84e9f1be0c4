//! `forebay bench disk`: objects of a few sizes, stored and retrieved through the store with
//! everything that it does for them, beside what the same file gives to nothing but io_uring; how
//! long a log with millions of chunks takes to open; and, where a Python with it is given,
//! LMCache's local disk backend. With a GPU, objects come from its memory and go to it, and it
//! makes the checksums; the ceiling stays the disk's alone. It knows what is compared with what;
//! how each side does its I/O is theirs.
//!
//! In every run the store and the ceiling move as many objects of the same size, at the same depth,
//! in the same files. They take turns in slices of a run, so that a disk whose speed changes from
//! second to second changes for both; which of them goes first alternates. Both read in random
//! order. Both write from the same memory and in the files' order, as a log does, and what a slice
//! wrote is durable when the slice ends. CPU time is that of the whole process; on our side it
//! includes checksums, footers, commits and eviction. fio and LMCache, where they are given, have
//! whole runs of their own between ours.

pub mod file;
mod fio;
mod gpu;
mod image;
pub mod memory;
mod ours;
mod peer;
pub mod raw;
mod recovery;
mod sides;

use crate::output::{CommandResult, Error, Output, finish};
use file::TestFiles;
use forebay_results::{Results, Row};
use memory::{At, Direction, MIB, Objects};
use ours::Ours;
use peer::PeerProcess;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use raw::Raw;
use sides::{Figures, Side, cpu_row, cpu_rows};
use std::path::PathBuf;

/// Sizes: name, bytes, and how many are under way at a time on each disk: enough to keep those of
/// the study busy.
const SIZES: [Size; 4] =
    [("80kib", 80 << 10, 16), ("128kib", 128 << 10, 16), ("1mib", 1 << 20, 8), ("2mib", 2 << 20, 4)];
type Size = (&'static str, u64, usize);
/// The size that is also measured after everything was overwritten several times.
const CHURNED: &str = "128kib";
/// How often everything is overwritten before.
const CAPACITIES: u64 = 3;
/// Batches of `depth` objects that our side submits ahead, so that the disk's queue stays full
/// while one is checked.
const BATCHES: usize = 4;
/// Turns that each side takes in a run.
const SLICES: usize = 4;

/// Arguments of `forebay bench disk`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory on the disk under test, whose file system must allow direct I/O; repeat for each
    /// disk that objects are spread over
    #[arg(long, value_name = "DIR", required = true)]
    dir: Vec<PathBuf>,
    /// Sizes of objects, all of them by default: 80kib, 128kib, 1mib, 2mib
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = size)]
    sizes: Vec<Size>,
    /// Number of runs of each kind
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// MiB moved in a run; the file takes about twice as much for each run
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(8..=1 << 20))]
    run_mib: u64,
    /// Number of chunks in the log whose recovery is measured
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u32).range(1_000..=100_000_000))]
    recovery_chunks: u32,
    /// Objects come from the memory of this GPU and go to it, where checksums are made
    #[arg(long, conflicts_with_all = ["recovery_chunks", "lmcache_python"])]
    gpu: Option<u16>,
    /// Run everything for a few seconds: shows that it works, and measures nothing
    #[arg(long, conflicts_with_all = ["runs", "run_mib", "recovery_chunks"])]
    quick: bool,
    #[command(flatten)]
    peer: peer::Args,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(mut args: Args) -> CommandResult {
    if args.quick {
        (args.runs, args.run_mib, args.recovery_chunks) = (2, 16, 100_000);
    }
    let mut results = Results::new("disk");
    if args.gpu.is_none() {
        results.rows.extend(recovery::rows(&args.dir[0], args.recovery_chunks, args.runs)?);
    }
    results.gpus(args.gpu.map(gpu::name).into_iter().collect::<Result<_, _>>()?);
    let sizes = if args.sizes.is_empty() { SIZES.to_vec() } else { args.sizes.clone() };
    for (name, bytes, depth) in sizes {
        let depth = depth * args.dir.len();
        results.rows.extend(Bench::new(&args, Objects { bytes, depth, slots: BATCHES * depth })?.rows(name)?);
    }
    finish(&results, &args.output)
}

/// The size that is called so.
fn size(name: &str) -> Result<Size, String> {
    let names = SIZES.map(|(name, ..)| name).join(", ");
    let found = SIZES.into_iter().find(|(size, ..)| *size == name);
    found.ok_or_else(|| format!("'{name}' is not allowed: {names}"))
}

/// Objects of one size, and all who move them.
struct Bench<'a> {
    args: &'a Args,
    objects: Objects,
    /// Objects of a run.
    count: usize,
    ours: Ours,
    raw: Raw,
    peer: Option<PeerProcess>,
    random: StdRng,
    /// Last, so that they are removed after everybody has closed them.
    files: TestFiles,
}

impl Bench<'_> {
    fn new(args: &Args, objects: Objects) -> Result<Bench<'_>, Error> {
        let count = (args.run_mib * MIB / objects.bytes) as usize;
        let files = TestFiles::make(&args.dir, u64::from(args.runs) * args.run_mib * MIB)?;
        let ours = Ours::open(&files, objects, args.gpu)?;
        let raw = Raw::open(&files.paths(), ours.memory())?;
        let peer = PeerProcess::start(&args.peer, &args.dir[0], objects, count)?;
        let random = StdRng::seed_from_u64(objects.bytes);
        Ok(Bench { args, objects, count, ours, raw, peer, random, files })
    }

    fn rows(mut self, name: &str) -> Result<Vec<Row>, Error> {
        let (mut store, mut retrieve) = (Figures::default(), Figures::default());
        for run in 0..self.args.runs {
            self.store_run(&mut store, run)?;
            self.peer_run(&mut store, &mut retrieve)?;
        }
        self.retrieve_runs(&mut retrieve)?;
        let of = if self.args.gpu.is_some() { "ssd.gpu" } else { "disk" };
        let mut rows = Vec::new();
        for (direction, figures) in [("retrieve", &retrieve), ("store", &store)] {
            let name = format!("{direction}.{name}");
            rows.extend(figures.rate_rows(of, &name, self.objects));
            rows.extend(self.args.gpu.map(|_| cpu_row(of, &name, figures)));
        }
        if self.args.gpu.is_some() {
            return Ok(rows);
        }
        rows.extend(cpu_rows(name, [&store, &retrieve]));
        if name == CHURNED {
            rows.extend(self.churned_rows(name)?);
        }
        Ok(rows)
    }

    /// The same after the log was filled again and again.
    fn churned_rows(&mut self, name: &str) -> Result<Vec<Row>, Error> {
        self.ours.store((CAPACITIES * self.files.log_bytes() / self.objects.bytes) as usize)?;
        let (mut store, mut retrieve) = (Figures::default(), Figures::default());
        for run in 0..self.args.runs {
            self.store_run(&mut store, run)?;
        }
        self.retrieve_runs(&mut retrieve)?;
        let mut rows = Vec::new();
        rows.extend(retrieve.rate_rows("disk", &format!("retrieve.churn.{name}"), self.objects));
        rows.extend(store.rate_rows("disk", &format!("store.churn.{name}"), self.objects));
        Ok(rows)
    }

    /// New objects on our side; the next stretch of its room for the ceiling.
    fn store_run(&mut self, figures: &mut Figures, run: u32) -> Result<(), Error> {
        let places = self.files.places(self.objects.bytes);
        let from = (run as usize * self.count).min(places.len() - self.count);
        self.slices(figures, Direction::Write, &places[from..from + self.count])
    }

    fn retrieve_runs(&mut self, figures: &mut Figures) -> Result<(), Error> {
        let mut places = self.files.places(self.objects.bytes);
        let count = self.count.min(self.ours.resident());
        for _ in 0..self.args.runs {
            places.shuffle(&mut self.random);
            self.ours.shuffle(&mut self.random);
            self.slices(figures, Direction::Read, &places[..count])?;
        }
        Ok(())
    }

    /// A run: an object for each place, by both sides in turn.
    fn slices(&mut self, figures: &mut Figures, direction: Direction, places: &[At]) -> Result<(), Error> {
        for (slice, places) in places.chunks(places.len().div_ceil(SLICES)).enumerate() {
            let count = places.len();
            for turn in 0..2 {
                match (turn == slice % 2, direction) {
                    (true, _) => figures.raw.time(count, || self.raw.run(direction, places))?,
                    (false, Direction::Write) => figures.ours.time(count, || self.ours.store(count))?,
                    (false, Direction::Read) => figures.ours.time(count, || self.ours.retrieve(count))?,
                }
            }
        }
        figures.raw.end_run(self.objects);
        figures.ours.end_run(self.objects);
        // fio would not take the disks in turn as we do.
        if let ([file], Some(version)) = (&self.files.0[..], fio::version()) {
            let mib_per_s = fio::mib_per_s(direction, file, self.objects, self.args.run_mib)?;
            // Its CPU time is that of another process and not known here.
            figures.fio.get_or_insert_with(|| (version, Side::default())).1.note(mib_per_s, 0.0);
        }
        Ok(())
    }

    fn peer_run(&mut self, store: &mut Figures, retrieve: &mut Figures) -> Result<(), Error> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let run = peer.run()?;
        for (figures, mib_per_s, cpu_us) in [
            (store, run.store_mib_per_s, run.store_cpu_us),
            (retrieve, run.retrieve_mib_per_s, run.retrieve_cpu_us),
        ] {
            let (_, side) = figures.lmcache.get_or_insert_with(|| (peer.version.clone(), Side::default()));
            side.note(mib_per_s, cpu_us);
        }
        Ok(())
    }
}
