//! The results object that every benchmark and the demo write with `--json FILE`: what was
//! measured, on which machine, at which commit, beside which ceiling. [`output`] is what commands
//! print.

#[macro_use]
pub mod output;

use serde::Serialize;
use std::path::Path;

/// One benchmark's outcome.
#[derive(Debug, Serialize)]
pub struct Results {
    bench: String,
    commit: String,
    date: String,
    machine: Machine,
    /// The measured figures.
    pub rows: Vec<Row>,
}

/// One figure. `value` is the median of `runs` runs; `ceiling` and `peer` are of the same run or
/// absent.
#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// Dotted, lower case and stable, such as `copy.host.26kib`.
    pub name: String,
    /// Unit of `value`, `min`, `max` and `ceiling`.
    pub unit: &'static str,
    /// The median.
    pub value: f64,
    /// The smallest of the runs.
    pub min: f64,
    /// The largest of the runs.
    pub max: f64,
    pub runs: usize,
    /// What the machine gave at best in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<f64>,
    /// `value / ceiling`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// CPU seconds per 10^9 bytes moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_s_per_gb: Option<f64>,
    /// Another system in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
}

/// Another system's figure from the same run.
#[derive(Debug, Serialize)]
pub struct Peer {
    pub name: String,
    /// Which version ran.
    pub version: String,
    /// Its median, in the row's unit.
    pub value: f64,
}

#[derive(Debug, Serialize)]
struct Machine {
    cpus: usize,
    memory_gib: f64,
    kernel: String,
    gpus: Vec<String>,
    disk: Option<String>,
}

impl Row {
    /// A row from the values of several runs. The median of an even number is the mean of the
    /// middle two; no runs give a row with `runs` 0 and zeros, so that a missing measurement is
    /// visible.
    pub fn of_runs(name: impl Into<String>, unit: &'static str, runs: &[f64]) -> Row {
        let mut sorted = runs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let value = match sorted.len() {
            0 => 0.0,
            n if n % 2 == 1 => sorted[middle],
            _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
        };
        let (min, max) = (sorted.first().copied().unwrap_or(0.0), sorted.last().copied().unwrap_or(0.0));
        Row { name: name.into(), unit, value, min, max, runs: sorted.len(), ..Row::default() }
    }

    /// Adds the ceiling of the same run and the ratio to it.
    pub fn with_ceiling(mut self, ceiling: f64) -> Row {
        self.ceiling = Some(ceiling);
        self.ratio = (ceiling > 0.0).then(|| self.value / ceiling);
        self
    }
}

impl Results {
    /// An empty object for `bench`, stamped with this machine, the commit and the time.
    pub fn new(bench: impl Into<String>) -> Results {
        Results {
            bench: bench.into(),
            commit: commit(),
            date: date(),
            machine: Machine::here(),
            rows: Vec::new(),
        }
    }

    /// Names the machine's GPUs.
    pub fn gpus(&mut self, names: Vec<String>) {
        self.machine.gpus = names;
    }

    /// Names the disk that was measured.
    pub fn disk(&mut self, name: impl Into<String>) {
        self.machine.disk = Some(name.into());
    }

    /// Writes the object as indented JSON.
    pub fn write(&self, file: &Path) -> std::io::Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(file, text)
    }
}

impl Machine {
    fn here() -> Machine {
        let memory_kib: f64 = std::fs::read_to_string("/proc/meminfo")
            .ok()
            .and_then(|text| text.split_whitespace().nth(1).and_then(|word| word.parse().ok()))
            .unwrap_or(0.0);
        Machine {
            cpus: cpus(),
            memory_gib: (memory_kib / 1024.0 / 1024.0 * 10.0).round() / 10.0,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            gpus: Vec::new(),
            disk: None,
        }
    }
}

/// Processors of the machine, not only those that a benchmark has bound itself to.
fn cpus() -> usize {
    let listed = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    listed.lines().filter(|line| line.starts_with("processor")).count()
}

/// The commit of the checkout in the current directory, with `-dirty` when it has changes, or
/// `unknown` outside of one.
fn commit() -> String {
    std::process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map_or_else(|| "unknown".into(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Now, as an ISO 8601 day and time in UTC. Civil-from-days after H. Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms".
pub fn date() -> String {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs());
    let (days, second_of_day) = ((seconds / 86_400) as i64, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_shifted + 2) / 5 + 1;
    let month = if month_shifted < 10 { month_shifted + 3 } else { month_shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second_of_day / 3_600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
