//! Copies of all sizes in one piece: for one GPU, whose copies may take every link, and for all
//! GPUs at once, whose links nobody else can have. Whoever copies takes turns with the driver and
//! with the ceiling, so that all see the same minute of the machine.

use super::ceiling::ceiling;
use super::ends::Job;
use super::plan::Plan;
use super::rig::{Rig, Timed};
use super::size::Size;
use super::way::{Course, Way};
use crate::output::Outcome;
use crate::timing::{Cost, median};
use forebay_results::{Peer, Row};

/// Smaller copies vary more, and take no time.
const SMALL_BYTES: u64 = 16 << 20;
/// Copies at once begin on several threads, some ten microseconds apart, which smaller ones would
/// show.
const AT_ONCE_BYTES_MIN: u64 = 4 << 20;

/// What came out.
pub struct Sweep {
    pub rows: Vec<Row>,
    /// Processors that were busy while the largest copies were under way, at most.
    pub cores: Row,
    /// The first GPU's rates, for a picture.
    pub points: Vec<Point>,
}

/// Rates of one size.
pub struct Point {
    pub course: Course,
    pub bytes: u64,
    pub native: f64,
    pub ours: f64,
    pub ceiling: f64,
}

/// Copies that are done at once, and what they are called.
struct Case {
    name: String,
    course: Course,
    bytes: u64,
    jobs: Vec<Job>,
}

/// What was measured of a case.
struct Figures {
    ceiling: f64,
    native: Vec<Timed>,
    ways: Vec<(Way, Vec<Timed>)>,
}

/// Measures all of it.
pub fn sweep(rig: &Rig, plan: &Plan) -> Outcome<Sweep> {
    let (mut rows, mut points, mut cores) = (Vec::new(), Vec::new(), Vec::new());
    for &course in &plan.courses {
        for (group, gpus) in groups(rig, plan) {
            let is_first = gpus == [plan.first()];
            let sizes = sizes(rig, plan, course, &gpus);
            for &bytes in &sizes {
                let case = case(rig, (&group, &gpus), course, bytes);
                let figures = case.measure(rig, plan)?;
                if is_first {
                    points.push(figures.point(&case));
                }
                if sizes.last() == Some(&bytes) {
                    cores.push(figures.cores());
                }
                rows.extend(figures.rows(&case, rig));
            }
        }
    }
    let busiest = cores.into_iter().max_by(|one: &Vec<f64>, other| median(one).total_cmp(&median(other)));
    let cores = Row::of_runs("copy.cpu_cores", "cores", &busiest.unwrap_or_default());
    Ok(Sweep { rows, cores, points })
}

/// GPUs whose copies are under way at once, with the name of the group in rows.
fn groups(rig: &Rig, plan: &Plan) -> Vec<(String, Vec<usize>)> {
    let name = |gpu: usize| if gpu == plan.first() { "1gpu".into() } else { format!("gpu{gpu}") };
    let mut groups: Vec<_> = plan.targets.iter().map(|&gpu| (name(gpu), vec![gpu])).collect();
    if rig.ends.len() > 1 {
        groups.push(("allgpus".into(), (0..rig.ends.len()).collect()));
    }
    groups
}

fn sizes(rig: &Rig, plan: &Plan, course: Course, gpus: &[usize]) -> Vec<u64> {
    let most = gpus.iter().map(|&gpu| rig.ends[gpu].bytes()).min().unwrap_or(0);
    let least = if gpus.len() * course.directions().len() > 1 { AT_ONCE_BYTES_MIN } else { 0 };
    plan.sizes.iter().copied().filter(|bytes| (least..=most).contains(bytes)).collect()
}

fn case(rig: &Rig, (group, gpus): (&str, &[usize]), course: Course, bytes: u64) -> Case {
    let of = |&gpu| course.directions().iter().map(move |&direction| rig.whole(gpu, direction, bytes));
    let jobs = gpus.iter().flat_map(of).collect();
    Case { name: format!("copy.{}.{group}.{}", course.name(), Size(bytes)), course, bytes, jobs }
}

impl Case {
    fn measure(&self, rig: &Rig, plan: &Plan) -> Outcome<Figures> {
        let (mut ceilings, mut native) = (Vec::new(), Vec::new());
        let mut ways: Vec<(Way, Vec<Timed>)> = plan.ways.iter().map(|way| (*way, Vec::new())).collect();
        let runs = if self.bytes < SMALL_BYTES { 3 * plan.runs } else { plan.runs };
        for run in 0..runs {
            ceilings.push(ceiling(rig, self.course)?);
            let native_first = run % 2 == 0;
            if native_first {
                native.push(rig.timed(Way::Direct, &self.jobs)?);
            }
            for (way, costs) in &mut ways {
                costs.push(rig.timed(*way, &self.jobs)?);
            }
            if !native_first {
                native.push(rig.timed(Way::Direct, &self.jobs)?);
            }
        }
        Ok(Figures { ceiling: median(&ceilings), native, ways })
    }

    /// Bytes that are copied in all.
    fn all_bytes(&self) -> u64 {
        self.bytes * self.jobs.len() as u64
    }

    fn rates(&self, timed: &[Timed], which: Which) -> Vec<f64> {
        timed.iter().map(|timed| which(timed).gb_per_s(self.all_bytes())).collect()
    }
}

impl Figures {
    /// For each way a row of copies as one of many, and one of copies after a pause.
    fn rows(&self, case: &Case, rig: &Rig) -> Vec<Row> {
        let whiches: [(&str, Which); 2] = [("", |timed| timed.again), (".first", |timed| timed.first)];
        let row = |(nth, (way, timed)): (usize, &(Way, Vec<Timed>))| {
            // The first way has the plain name.
            let name =
                if nth == 0 { case.name.clone() } else { format!("{}.{way:?}", case.name).to_lowercase() };
            whiches.map(|(suffix, which)| self.row(format!("{name}{suffix}"), timed, which, case, rig))
        };
        self.ways.iter().enumerate().flat_map(row).collect()
    }

    fn row(&self, name: String, timed: &[Timed], which: Which, case: &Case, rig: &Rig) -> Row {
        let mut row = Row::of_runs(name, "GB/s", &case.rates(timed, which)).with_ceiling(self.ceiling);
        let cpu_s: f64 = timed.iter().map(|timed| which(timed).cpu_s).sum();
        row.cpu_s_per_gb = Some(cpu_s / (case.all_bytes() as f64 / 1e9 * timed.len() as f64));
        row.peer = Some(peer(rig, Way::Direct, median(&case.rates(&self.native, which))));
        row
    }

    fn cores(&self) -> Vec<f64> {
        self.ways[0].1.iter().map(|timed| timed.again.cores()).collect()
    }

    fn point(&self, case: &Case) -> Point {
        let rate = |timed: &[Timed]| median(&case.rates(timed, |timed| timed.again));
        Point {
            course: case.course,
            bytes: case.bytes,
            native: rate(&self.native),
            ours: rate(&self.ways[0].1),
            ceiling: self.ceiling,
        }
    }
}

/// One of the two costs of a copy.
type Which = fn(&Timed) -> Cost;

/// Somebody else's figure.
pub fn peer(rig: &Rig, way: Way, value: f64) -> Peer {
    let version = rig.driver().version();
    let version = format!("{}.{}", version / 1000, version % 1000 / 10);
    Peer { name: way.name().into(), version, value }
}
