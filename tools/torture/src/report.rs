//! What came of a run, as a table that compares stores and as figures. This file knows how outcomes
//! are shown.

use crate::case::Verdict;
use crate::rig::Seen;
use std::fmt::Write;
use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Outcome {
    pub case: &'static str,
    pub what: &'static str,
    /// Whether it was passed, and if not, all that was found.
    pub verdict: Verdict,
    pub seen: Seen,
    pub took: Duration,
}

#[derive(Debug, Clone)]
pub struct Report {
    pub columns: Vec<Column>,
}

/// What came of a run for one store.
#[derive(Debug, Clone)]
pub struct Column {
    pub store: String,
    /// In the order in which cases ran.
    pub outcomes: Vec<Outcome>,
}

impl Column {
    /// Cases that could be played.
    pub fn faults(&self) -> usize {
        self.count(|verdict| !matches!(verdict, Verdict::NotApplicable(_)))
    }

    pub fn failed(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Failed(_)))
    }

    pub fn wrong_bytes(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.seen.wrong_bytes).sum()
    }

    pub fn crash_points(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.seen.crash_points).sum()
    }

    fn count(&self, counts: impl Fn(&Verdict) -> bool) -> usize {
        self.outcomes.iter().filter(|outcome| counts(&outcome.verdict)).count()
    }
}

impl Report {
    pub fn of(&self, store: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.store == store)
    }

    /// The table, in Markdown: cases down, stores across, and below what was found.
    pub fn markdown(&self) -> String {
        let mut text = String::from("| case |");
        self.columns.iter().for_each(|column| _ = write!(text, " {} |", column.store));
        text.push_str("\n|---|");
        self.columns.iter().for_each(|_| text.push_str("---|"));
        text.push('\n');
        let cases = self.columns.first().map_or(0, |column| column.outcomes.len());
        for at in 0..cases {
            let row = self.columns.iter().filter_map(|column| column.outcomes.get(at));
            let name = self.columns[0].outcomes[at].case;
            let cells: Vec<_> = row.map(|outcome| word(&outcome.verdict)).collect();
            // Writing to a string does not fail.
            _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
        }
        type Figure = fn(&Column) -> u64;
        let figures: [(&str, Figure); 4] = [
            ("cases played", |column| column.faults() as u64),
            ("cases failed", |column| column.failed() as u64),
            ("wrong bytes", Column::wrong_bytes),
            ("crash points", Column::crash_points),
        ];
        for (name, figure) in figures {
            let cells: Vec<_> = self.columns.iter().map(|column| figure(column).to_string()).collect();
            _ = writeln!(text, "| *{name}* | {} |", cells.join(" | "));
        }
        text
    }

    /// What was found and noted, a line for each store and case.
    pub fn findings(&self) -> String {
        let mut text = String::new();
        for column in &self.columns {
            for outcome in &column.outcomes {
                if let Some(line) = finding(outcome) {
                    _ = writeln!(text, "* {}, {}: {line}", column.store, outcome.case);
                }
            }
        }
        text
    }
}

/// What is worth telling of an outcome beyond its word in the table.
pub fn finding(outcome: &Outcome) -> Option<String> {
    let why = match &outcome.verdict {
        Verdict::Passed => None,
        Verdict::Failed(why) | Verdict::NotApplicable(why) => Some(why),
    };
    let parts: Vec<_> = why.into_iter().chain(&outcome.seen.notes).map(String::as_str).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

pub fn word(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "pass",
        Verdict::Failed(_) => "**FAIL**",
        Verdict::NotApplicable(_) => "n/a",
    }
}
