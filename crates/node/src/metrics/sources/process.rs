//! What the process has to show: the CPU time that it used and the memory that it holds. An idle
//! node's CPU time stands still.

use super::{counter, gauge, push_one};
use crate::metrics::{Family, Metric};
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

const CPU: Family =
    counter("forebay_process_cpu_seconds_total", "CPU time of all threads, by where it was spent.");
const RESIDENT: Family = gauge("forebay_process_resident_bytes", "Memory of the process that is in RAM.");
const FILES: Family = gauge("forebay_process_open_files", "Open file descriptors.");
const START: Family = gauge("forebay_process_start_time_seconds", "When it started, since 1970.");

/// Shows this process, which starts now.
pub fn source() -> impl Fn(&mut Vec<Metric>) + Send + Sync {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    move |out: &mut Vec<Metric>| {
        push_one(out, &START, started.as_secs_f64());
        if let Ok(stat) = fs::read_to_string("/proc/self/stat") {
            collect_cpu(&stat, out);
        }
        if let Ok(statm) = fs::read_to_string("/proc/self/statm") {
            collect_resident(&statm, out);
        }
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // One of them is the folder that is being read.
            push_one(out, &FILES, files.count().saturating_sub(1) as f64);
        }
    }
}

/// From `/proc/<pid>/stat`: after the name in parentheses, which may hold anything, the 12th and
/// 13th field are user and system time in ticks.
fn collect_cpu(stat: &str, out: &mut Vec<Metric>) {
    let Some((_, fields)) = stat.rsplit_once(')') else { return };
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let mut times = fields.split_ascii_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
    for mode in ["user", "system"] {
        let Some(ticks) = times.next() else { return };
        out.push(Metric::new(&CPU, &[("mode", mode)], ticks as f64 / ticks_per_second));
    }
}

/// From `/proc/<pid>/statm`: the second field is in pages.
fn collect_resident(statm: &str, out: &mut Vec<Metric>) {
    if let Some(pages) = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()) {
        push_one(out, &RESIDENT, (pages * rustix::param::page_size() as u64) as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_shows_its_times_and_its_memory() {
        let mut out = Vec::new();
        source()(&mut out);
        let names: Vec<&str> = out.iter().map(|metric| metric.family.name).collect();
        for family in [&CPU, &RESIDENT, &FILES, &START] {
            assert!(names.contains(&family.name), "{} is missing", family.name);
        }
    }

    #[test]
    fn a_name_with_parentheses_hides_nothing() {
        let mut out = Vec::new();
        collect_cpu("7 (a) b)) S 1 2 3 4 5 6 7 8 9 10 300 200 0", &mut out);
        assert_eq!(out.len(), 2);
        out.clear();
        collect_cpu("7 (short) S 1", &mut out);
        collect_resident("", &mut out);
        assert!(out.is_empty());
    }
}
