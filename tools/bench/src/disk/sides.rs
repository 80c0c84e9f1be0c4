//! What each side did: time, CPU time and objects of every run, and the rows that follow. This file
//! knows arithmetic on runs.

use super::memory::{MIB, Objects};
use crate::output::Error;
use crate::timing::{cost, median};
use forebay_results::{Peer, Row};

/// One side in all runs of one kind.
#[derive(Default)]
pub struct Side {
    /// Of the run that is under way.
    wall_s: f64,
    cpu_s: f64,
    count: usize,
    /// Of each run that ended.
    mib_per_s: Vec<f64>,
    cpu_us_per_object: Vec<f64>,
}

/// What was measured of one kind: our side, the ceiling, and whoever else was there.
#[derive(Default)]
pub struct Figures {
    /// The store.
    pub ours: Side,
    /// Bare io_uring.
    pub raw: Side,
    /// fio, if it is installed.
    pub fio: Option<(String, Side)>,
    /// LMCache, if it was given.
    pub lmcache: Option<(String, Side)>,
}

impl Side {
    /// Runs a part of a run that moves `count` objects. CPU time is that of the whole process.
    pub fn time(&mut self, count: usize, part: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let cost = cost(part)?;
        self.wall_s += cost.wall_s;
        self.cpu_s += cost.cpu_s;
        self.count += count;
        Ok(())
    }

    /// Notes the run whose parts were timed.
    pub fn end_run(&mut self, objects: Objects) {
        let bytes = self.count as u64 * objects.bytes;
        self.note(bytes as f64 / MIB as f64 / self.wall_s, self.cpu_s * 1e6 / self.count as f64);
        (self.wall_s, self.cpu_s, self.count) = (0.0, 0.0, 0);
    }

    /// Notes a run that somebody else timed.
    pub fn note(&mut self, mib_per_s: f64, cpu_us_per_object: f64) {
        self.mib_per_s.push(mib_per_s);
        self.cpu_us_per_object.push(cpu_us_per_object);
    }

    fn cpu_us(&self) -> f64 {
        median(&self.cpu_us_per_object)
    }

    fn rate(&self, name: String, objects: Objects) -> Row {
        let mut row = Row::of_runs(name, "MiB/s", &self.mib_per_s);
        row.cpu_s_per_gb = Some(self.cpu_us() * 1e3 / objects.bytes as f64);
        row
    }
}

impl Figures {
    /// Our rate beside ceiling and peer, then the ceiling's own row. `of` is `disk`, or what
    /// objects come to beside.
    pub fn rate_rows(&self, of: &str, name: &str, objects: Objects) -> [Row; 2] {
        let peer = |of: &Option<(String, Side)>, name: &str| {
            let (version, side) = of.as_ref()?;
            let value = median(&side.mib_per_s);
            Some(Peer { name: name.into(), version: version.clone(), value })
        };
        let mut raw = self.raw.rate(format!("{of}.raw.{name}"), objects);
        raw.peer = peer(&self.fio, "fio");
        let mut ours = self.ours.rate(format!("{of}.{name}"), objects).with_ceiling(raw.value);
        ours.peer = peer(&self.lmcache, "lmcache");
        [ours, raw]
    }
}

/// CPU time per object in a direction: ours beside what the system takes for the I/O alone.
pub fn cpu_row(of: &str, name: &str, figures: &Figures) -> Row {
    let row = Row::of_runs(format!("{of}.{name}.cpu_us"), "us", &figures.ours.cpu_us_per_object);
    row.with_ceiling(figures.raw.cpu_us())
}

/// CPU time per object in the direction that costs more: ours beside the peer's, then the
/// ceiling's, which is what the system takes for the I/O alone.
pub fn cpu_rows(name: &str, both: [&Figures; 2]) -> [Row; 2] {
    let row = |name: String, sides: [&Side; 2]| {
        let [one, other] = sides;
        let dearer = if one.cpu_us() >= other.cpu_us() { one } else { other };
        Row::of_runs(name, "us", &dearer.cpu_us_per_object)
    };
    let mut ours = row(format!("disk.cpu_us.{name}"), both.map(|figures| &figures.ours));
    if let [Some((version, one)), Some((_, other))] = both.map(|figures| figures.lmcache.as_ref()) {
        let value = row(String::new(), [one, other]).value;
        ours.peer = Some(Peer { name: "lmcache".into(), version: version.clone(), value });
    }
    [ours, row(format!("disk.raw.cpu_us.{name}"), both.map(|figures| &figures.raw))]
}
