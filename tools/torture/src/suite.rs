//! The suite: every case on every store, each on a directory of its own, and what came of it. This
//! file knows cases and stores by name only.

use crate::case::{Case, Verdict};
use crate::cases;
use crate::report::{Column, Outcome, Report};
use crate::rig::{Rig, Scale, Seen};
use crate::worker::{Broken, Launch, Timeouts};
use std::io;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Debug, Clone)]
pub struct Store {
    /// Its name in tables and results.
    pub name: String,
    pub launch: Launch,
    pub timeouts: Timeouts,
}

#[derive(Debug, Clone)]
pub struct Suite {
    pub stores: Vec<Store>,
    /// A part of the names of the cases to run; empty for all.
    pub only: String,
    pub scale: Scale,
    /// Where the stores' files are for as long as their case runs.
    pub dir: PathBuf,
}

impl Scale {
    /// For a table that is published.
    pub fn full() -> Scale {
        Scale {
            keys: 64,
            value_bytes: 128 << 10,
            capacity_bytes: 64 << 20,
            staging_bytes: 32 << 20,
            kills: 50,
            crash_points: 1_000,
            seed: 1,
        }
    }

    /// For every change of the code: a minute or two.
    pub fn quick() -> Scale {
        Scale { keys: 32, capacity_bytes: 32 << 20, kills: 6, crash_points: 40, ..Scale::full() }
    }
}

impl Suite {
    /// Runs everything. `on_outcome` is told of each case as it ends.
    pub fn run(&self, mut on_outcome: impl FnMut(&Store, &Outcome)) -> io::Result<Report> {
        let mut columns = Vec::new();
        for store in &self.stores {
            let mut outcomes = Vec::new();
            for case in cases::all().into_iter().filter(|case| case.name.contains(&self.only)) {
                let outcome = self.run_case(store, &case)?;
                on_outcome(store, &outcome);
                outcomes.push(outcome);
            }
            columns.push(Column { store: store.name.clone(), outcomes });
        }
        Ok(Report { columns })
    }

    fn run_case(&self, store: &Store, case: &Case) -> io::Result<Outcome> {
        let dir = self.dir.join(format!(
            "{}-{}",
            store.name,
            case.name.replace(|c: char| !c.is_alphanumeric(), "-")
        ));
        std::fs::create_dir(&dir)?;
        let started = Instant::now();
        let mut rig = Rig::new(store.launch.clone(), store.timeouts, self.scale.clone(), dir.clone());
        let ran = (case.run)(&mut rig);
        let seen = rig.seen.clone();
        // Ends the worker before its files go.
        drop(rig);
        std::fs::remove_dir_all(&dir)?;
        let verdict = judge(ran, &seen)?;
        Ok(Outcome { case: case.name, what: case.what, verdict, seen, took: started.elapsed() })
    }
}

/// The suite's own trouble is an error; everything else is the store's.
fn judge(ran: Result<Verdict, Broken>, seen: &Seen) -> io::Result<Verdict> {
    let mut found = Vec::new();
    if seen.wrong_values > 0 {
        let first = seen.first_wrong.as_deref().unwrap_or_default();
        found.push(format!("{} of {} values are wrong; {first}", seen.wrong_values, seen.hits));
    }
    if seen.errors > 0 {
        let first = seen.first_error.as_deref().unwrap_or_default();
        found.push(format!("{} answers are exceptions; {first}", seen.errors));
    }
    match ran {
        Ok(Verdict::Passed) => {}
        Ok(Verdict::Failed(why)) => found.push(why),
        Ok(other) if found.is_empty() => return Ok(other),
        Ok(_) => {}
        Err(Broken::System(error)) => return Err(error),
        Err(broken) => found.push(broken.to_string()),
    }
    Ok(if found.is_empty() { Verdict::Passed } else { Verdict::Failed(found.join("; ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_value_fails_a_case_that_passed_otherwise() {
        let seen = Seen { hits: 100, wrong_values: 1, ..Seen::default() };
        assert!(matches!(judge(Ok(Verdict::Passed), &seen).unwrap(), Verdict::Failed(_)));
        let not_applicable = Verdict::NotApplicable("no ring".into());
        assert!(matches!(judge(Ok(not_applicable.clone()), &seen).unwrap(), Verdict::Failed(_)));
        assert_eq!(judge(Ok(not_applicable.clone()), &Seen::default()).unwrap(), not_applicable);
        assert_eq!(judge(Ok(Verdict::Passed), &Seen::default()).unwrap(), Verdict::Passed);
    }

    #[test]
    fn a_hang_fails_a_case() {
        let hangs = Broken::Hangs { command: "get", limit_s: 5 };
        assert!(matches!(judge(Err(hangs), &Seen::default()).unwrap(), Verdict::Failed(_)));
    }

    #[test]
    fn names_of_cases_are_different() {
        let mut names: Vec<_> = cases::all().iter().map(|case| case.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), cases::all().len());
    }
}
