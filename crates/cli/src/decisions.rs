//! Decision logs of routers as files: their lines, and what a report shows of their decisions.

use forebay_results::output::Error;
use forebay_router::{self as router, DecisionLine, EngineModel, Policy, judge};
use forebay_trace::record::{Choice, Counter, DecisionSample, Line, RecordWriter};
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A line of a log with a thousand engines is shorter.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Lines that cannot be read are named up to so many; all of them are counted.
const NAMED_LINES: u64 = 5;

/// Hands each line over with the place in the file where it begins. Returns how many could not be
/// read, or were refused by `take`; the first of them are named on stderr.
pub fn read_lines(
    path: &Path,
    mut take: impl FnMut(u64, router::Line) -> Result<(), String>,
) -> Result<u64, Error> {
    let wrong = |error: std::io::Error| -> Error { format!("{}: {error}", path.display()).into() };
    let mut log = BufReader::new(File::open(path).map_err(wrong)?);
    let (mut line, mut begin, mut unread) = (Vec::new(), 0, 0);
    for number in 1_u64.. {
        line.clear();
        let read = log.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(wrong)?;
        if read == 0 {
            break;
        }
        let at = begin;
        begin += read as u64;
        let is_cut = read as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n');
        if is_cut {
            begin += log.skip_until(b'\n').map_err(wrong)? as u64;
        }
        let text = line.trim_ascii();
        // A file that was torn has an empty line where it goes on.
        if text.is_empty() {
            continue;
        }
        let taken = match is_cut {
            true => Err("longer than 1 MiB".to_owned()),
            false => {
                router::Line::read(text).map_err(|error| error.to_string()).and_then(|line| take(at, line))
            }
        };
        if let Err(reason) = taken {
            unread += 1;
            if unread <= NAMED_LINES {
                eprintln!("{}: line {number}: {reason}", path.display());
            }
        }
    }
    Ok(unread)
}

/// Decisions that the log lacks are a counter of this name.
pub const MISSING: &str = "decisions missing in the log";

/// How far a log had come.
#[derive(Debug)]
pub struct LogMark {
    path: PathBuf,
    inode: u64,
    bytes: u64,
}

impl LogMark {
    /// The end of a log that a router is writing.
    pub fn now(path: &Path) -> Result<LogMark, Error> {
        let metadata = std::fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(LogMark { path: path.to_owned(), inode: metadata.ino(), bytes: metadata.len() })
    }

    /// The decisions since then.
    pub fn read_since(&self, arm: &str, clock_ratio: f64) -> Result<ArmDecisions, Error> {
        let is_same = LogMark::now(&self.path)?.inode == self.inode;
        if !is_same {
            eprintln!(
                "{}: it has begun anew meanwhile; decisions before that are left out",
                self.path.display()
            );
        }
        ArmDecisions::read(&self.path, if is_same { self.bytes } else { 0 }, arm, clock_ratio)
    }
}

/// The decisions of one arm.
#[derive(Debug)]
pub struct ArmDecisions {
    pub samples: Vec<DecisionSample>,
    /// Decisions that the router made between these, and that the log does not have.
    pub missing: u64,
}

impl ArmDecisions {
    /// Appends them to the records of the arm.
    pub fn write(self, arm: &str, records: &RecordWriter) -> std::io::Result<()> {
        self.samples.into_iter().try_for_each(|sample| records.write(&Line::Decision(sample)))?;
        let counter = Counter { arm: arm.to_owned(), name: MISSING.to_owned(), value: self.missing };
        if self.missing > 0 { records.write(&Line::Counter(counter)) } else { Ok(()) }
    }

    /// Reads the decisions of an arm from a log, those behind its first `from_byte` bytes.
    pub fn read(path: &Path, from_byte: u64, arm: &str, clock_ratio: f64) -> Result<ArmDecisions, Error> {
        let mut known = None;
        let mut decisions: Vec<(DecisionLine, Router)> = Vec::new();
        read_lines(path, |at, line| {
            match line {
                router::Line::Router(line) => known = Some((line.policy, line.engine_model)),
                router::Line::Decision(line) if at >= from_byte => {
                    let router = known.ok_or("no line before it says what the router is")?;
                    decisions.push((*line, router));
                }
                router::Line::Decision(_) => {}
            }
            Ok(())
        })?;
        let mut numbers = HashSet::new();
        if let Some((line, _)) = decisions.iter().find(|(line, _)| !numbers.insert(line.record.number)) {
            let (log, number) = (path.display(), line.record.number);
            return Err(format!("{log}: decision {number} is there twice: the log is of two routers").into());
        }
        let span = numbers
            .iter()
            .min()
            .zip(numbers.iter().max())
            .map_or(0, |(first, last)| (last - first).saturating_add(1));
        let start_us = decisions.iter().map(|(line, _)| line.record.at_us).min().unwrap_or(0);
        let sample =
            |(line, router): &(DecisionLine, Router)| sample(line, router, start_us, arm, clock_ratio);
        let samples = decisions.iter().map(sample).collect();
        Ok(ArmDecisions { samples, missing: span - numbers.len() as u64 })
    }
}

/// The policy of a router, and what it takes its engines for.
type Router = (Policy, EngineModel);

/// The router predicts in model time, and what it measures is real time.
fn sample(
    DecisionLine { record, .. }: &DecisionLine,
    (policy, engine_model): &Router,
    start_us: u64,
    arm: &str,
    clock_ratio: f64,
) -> DecisionSample {
    let model_s = |real_us: u64| real_us as f64 * clock_ratio / 1e6;
    let choice = match &record.home {
        _ if record.is_refused() => Choice::Refused,
        _ if record.policy != *policy => Choice::ByLoad,
        None => Choice::NewSession,
        Some(home) if *home == record.backend => Choice::Home,
        Some(_) => Choice::Elsewhere,
    };
    let is_weighed = !matches!(choice, Choice::ByLoad | Choice::Refused);
    let predicted_ttft_s = is_weighed.then_some(record.predicted.first_byte_us as f64 / 1e6);
    let whole = record.outcome.filter(|outcome| outcome.is_whole());
    let ttft_s = whole.and_then(|outcome| outcome.first_byte_us).map(model_s);
    // What is predicted of a hand-over is not what the decoder alone would cost.
    let is_judged = is_weighed && record.hand_over.is_none();
    let judgement = is_judged.then(|| judge(engine_model, record).ok()).flatten();
    let over_best_other_s = judgement.and_then(|judgement| {
        let late_s = ttft_s? - predicted_ttft_s?;
        Some(judgement.cost_s + late_s - judgement.best_other_s?)
    });
    DecisionSample {
        arm: arm.to_owned(),
        at_s: model_s(record.at_us - start_us),
        choice,
        predicted_ttft_s,
        ttft_s,
        regret_s: judgement.map(|judgement| judgement.regret_s),
        over_best_other_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_steps::{Launch, Profile};
    use serde_json::{Value, json};

    /// Of the log.
    const VERSION: u64 = 2;
    const RATIO: f64 = 20.0;

    /// A decision between two engines, of a session that had the first before.
    fn decision(number: u64) -> Value {
        let candidate = |name: &str, pending_us: u64| {
            json!({
                "backend": name, "score": 1.0, "eligible": true, "in_flight": 0, "pending_prefill_tokens": 0,
                "pending_prefill_us": pending_us, "context_tokens": 0, "pool_tokens": 200_000, "hit_tokens": 0,
                "stored_tokens": 0, "load_us_per_token": 0.0,
            })
        };
        json!({
            "kind": "decision", "version": VERSION, "number": number, "at_us": 7_000_000 + number * 1_000,
            "session": "0", "input_tokens": 1_000, "output_tokens": 10, "home": "a", "policy": "lpwl",
            "attempt": 1, "backend": "a", "reason": "lowest-score",
            "predicted": {"first_byte_us": 900_000, "output_us": 0},
            "candidates": [candidate("a", 3_000_000), candidate("b", 0)],
            "outcome": {"status": 200, "failure": null, "cancelled": false, "first_byte_us": 50_000},
            "total_us": 60_000,
        })
    }

    fn read(lines: &[Value]) -> Result<ArmDecisions, String> {
        let engine_model = EngineModel::new(&Profile::shipped(Profile::DEFAULT).unwrap(), Launch::Graph);
        let header = json!({
            "kind": "router", "version": VERSION, "policy": "lpwl", "engine_model": engine_model,
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let text: String = [&[header], lines].concat().iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).unwrap();
        ArmDecisions::read(&path, 0, "arm", RATIO).map_err(|error| error.to_string())
    }

    #[test]
    fn what_the_router_measured_is_told_in_model_time_as_its_predictions_are() {
        let samples = read(&[decision(0), decision(2)]).unwrap().samples;
        assert_eq!((samples[0].at_s, samples[1].at_s), (0.0, 0.04));
        assert_eq!((samples[0].predicted_ttft_s, samples[0].ttft_s), (Some(0.9), Some(1.0)));
        // Both engines are idle, but that one has three seconds to compute first.
        assert!((samples[0].regret_s.unwrap() - 3.0).abs() < 1e-6, "{samples:?}");
        assert!((samples[0].over_best_other_s.unwrap() - 3.1).abs() < 1e-6, "{samples:?}");
    }

    #[test]
    fn a_choice_is_named_by_where_the_session_was() {
        let mut lines = [0, 1, 2, 3, 4].map(decision);
        lines[1]["home"] = json!("b");
        lines[2]["home"] = Value::Null;
        lines[3]["policy"] = json!("least-loaded");
        lines[4]["outcome"] = json!({"cancelled": false, "refused": "ttft-slo"});
        let samples = read(&lines).unwrap().samples;
        let choices: Vec<Choice> = samples.iter().map(|sample| sample.choice).collect();
        assert_eq!(choices, Choice::ALL);
        for sample in &samples[3..] {
            assert_eq!((sample.predicted_ttft_s, sample.regret_s), (None, None));
        }
    }

    #[test]
    fn decisions_that_are_missing_are_counted_and_two_routers_are_refused() {
        assert_eq!(read(&[decision(3), decision(4), decision(9)]).unwrap().missing, 4);
        assert_eq!(read(&[]).unwrap().missing, 0);
        let refused = read(&[decision(0), decision(1), decision(0)]).unwrap_err();
        assert!(refused.ends_with("decision 0 is there twice: the log is of two routers"), "{refused}");
    }
}
