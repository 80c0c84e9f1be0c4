//! The record log on disk: one JSON object a line, each written by a single append, so that a crash
//! of the process loses at most the line that was being written.

use super::{
    Counter, DecisionSample, GpuSample, Line, LinkSample, LoadSample, RequestRecord, RunInfo, Start,
};
use crate::format::Lines;
use forebay_transfer::lock::Mutex;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Appends lines to a log file. It can be shared: each line is written whole under a lock.
#[derive(Debug)]
pub struct RecordWriter {
    file: Mutex<File>,
}

/// All that a log holds, by kind and in the order written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RecordLog {
    /// How each arm was run.
    pub runs: Vec<RunInfo>,
    /// Requests that ended.
    pub requests: Vec<RequestRecord>,
    pub loads: Vec<LoadSample>,
    pub gpus: Vec<GpuSample>,
    pub links: Vec<LinkSample>,
    pub decisions: Vec<DecisionSample>,
    pub counters: Vec<Counter>,
    /// Lines that could not be read: their number from 1, and why. A torn last line is one of them.
    pub skipped: Vec<(u64, String)>,
}

/// A log that cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the record log {}: {source}", path.display())]
pub struct LogError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Arms of one log that cannot be compared: what some found cached was another arm's work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "engines had answered nothing when {} began, and had answered before {}: the arms cannot be compared. \
     Start the engines anew for each arm, or empty their caches and say so with --emptied",
    fresh.join(", "), warm.join(", ")
)]
pub struct MixedStarts {
    pub fresh: Vec<String>,
    pub warm: Vec<String>,
}

/// A line longer than this is damage, not a record.
const LINE_BYTES_MAX: usize = 1 << 20;

impl RecordWriter {
    /// Opens `path` for appending and makes it if it is missing. A torn last line of an earlier
    /// crash is closed first, so that it cannot swallow the next record.
    pub fn append(path: &Path) -> io::Result<RecordWriter> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        if file.seek(SeekFrom::End(0))? > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                file.write_all(b"\n")?;
            }
        }
        Ok(RecordWriter { file: Mutex::new(file) })
    }

    /// Appends one line. It has left the process when this returns.
    pub fn write(&self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.lock().write_all(&text)
    }
}

impl RecordLog {
    /// Reads a log file. Lines that are not records are skipped and listed.
    pub fn read(path: &Path) -> Result<RecordLog, LogError> {
        let at_path = |source| LogError { path: path.to_owned(), source };
        let file = File::open(path).map_err(at_path)?;
        RecordLog::from_reader(BufReader::new(file)).map_err(at_path)
    }

    /// Reads a log from any reader; see [`RecordLog::read`].
    pub fn from_reader(reader: impl BufRead) -> io::Result<RecordLog> {
        let mut log = RecordLog::default();
        let mut lines = Lines::new(reader, LINE_BYTES_MAX);
        while let Some((number, text)) = lines.next_line()? {
            let line = match text {
                Some(text) => serde_json::from_slice(text).map_err(|error| error.to_string()),
                None => Err(format!("longer than {LINE_BYTES_MAX} bytes")),
            };
            match line {
                Ok(line) => log.push(line),
                Err(why) => log.skipped.push((number, why)),
            }
        }
        Ok(log)
    }

    /// Adds one line.
    pub fn push(&mut self, line: Line) {
        match line {
            Line::Run(run) => self.runs.push(run),
            Line::Request(request) => self.requests.push(request),
            Line::Load(load) => self.loads.push(load),
            Line::Gpu(gpu) => self.gpus.push(gpu),
            Line::Link(link) => self.links.push(link),
            Line::Decision(decision) => self.decisions.push(decision),
            Line::Counter(counter) => self.counters.push(counter),
        }
    }

    /// Refuses arms of which some began with fresh engines and some with warm ones.
    pub fn check_starts(&self) -> Result<(), MixedStarts> {
        let arms = |start: Start| -> Vec<String> {
            let runs = self.runs.iter().filter(|run| run.start == Some(start));
            runs.map(|run| run.arm.clone()).collect()
        };
        let (fresh, warm) = (arms(Start::Fresh), arms(Start::Warm));
        if fresh.is_empty() || warm.is_empty() { Ok(()) } else { Err(MixedStarts { fresh, warm }) }
    }

    /// Adds all that another log holds.
    pub fn extend(&mut self, other: RecordLog) {
        self.runs.extend(other.runs);
        self.requests.extend(other.requests);
        self.loads.extend(other.loads);
        self.gpus.extend(other.gpus);
        self.links.extend(other.links);
        self.decisions.extend(other.decisions);
        self.counters.extend(other.counters);
        self.skipped.extend(other.skipped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Choice, Failure, FailureKind, Outcome};

    #[test]
    fn a_warm_arm_is_not_compared_with_a_fresh_one() {
        let log = |starts: &[(&str, Option<Start>)]| {
            let mut log = RecordLog::default();
            for (arm, start) in starts {
                log.push(Line::Run(RunInfo { arm: (*arm).into(), start: *start, parameters: Vec::new() }));
            }
            log.check_starts()
        };
        let (fresh, warm) = (Some(Start::Fresh), Some(Start::Warm));
        assert_eq!(log(&[("a", fresh), ("b", fresh), ("c", None)]), Ok(()));
        assert_eq!(log(&[("a", warm), ("b", warm)]), Ok(()));
        let refused = log(&[("a", fresh), ("b", warm), ("c", warm)]).unwrap_err();
        assert_eq!((refused.fresh.len(), refused.warm.len()), (1, 2));
        assert!(refused.to_string().contains("when a began, and had answered before b, c"), "{refused}");
    }

    fn request(turn: u32, outcome: Outcome) -> Line {
        Line::Request(RequestRecord {
            arm: "lpwl".into(),
            session: "s-1".into(),
            turn,
            backend: Some("engine-0".into()),
            arrival_s: 1.25,
            start_s: 1.26,
            ttft_s: Some(0.5),
            tpot_s: None,
            e2e_s: 0.75,
            input_tokens: 1000,
            carried_tokens: 640,
            early: false,
            asked_tokens: Some(1),
            output_tokens: 1,
            estimated: false,
            cached_tokens: Some(512),
            external_cached_tokens: Some(256),
            ssd_cached_tokens: Some(128),
            peer_cached_tokens: Some(64),
            wrong_tokens: Some(0),
            outcome,
        })
    }

    fn lines() -> Vec<Line> {
        vec![
            Line::Run(RunInfo {
                arm: "lpwl".into(),
                start: Some(Start::Fresh),
                parameters: vec![("model".into(), "m".into())],
            }),
            request(0, Outcome::Ok),
            request(1, Outcome::Failed(Failure::new(FailureKind::Reset, "connection reset"))),
            Line::Load(LoadSample {
                arm: "lpwl".into(),
                at_s: 2.0,
                instance: "engine-0".into(),
                running: 3,
                waiting: 1,
                kv_usage: 0.5,
            }),
            Line::Gpu(GpuSample {
                arm: "lpwl".into(),
                at_s: 2.0,
                gpu: 1,
                busy_percent: 87.0,
                memory_mib: 61_234.0,
            }),
            Line::Link(LinkSample { arm: "lpwl".into(), at_s: 2.0, link: "host".into(), bytes: 10, lots: 2 }),
            Line::Decision(DecisionSample {
                arm: "lpwl".into(),
                at_s: 1.5,
                choice: Choice::Elsewhere,
                predicted_ttft_s: Some(0.5),
                ttft_s: Some(0.75),
                regret_s: Some(0.25),
                over_best_other_s: None,
            }),
            Line::Counter(Counter { arm: "lpwl".into(), name: "corruptions caught".into(), value: 4 }),
        ]
    }

    fn collected(lines: Vec<Line>) -> RecordLog {
        let mut log = RecordLog::default();
        lines.into_iter().for_each(|line| log.push(line));
        log
    }

    #[test]
    fn what_was_written_reads_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("records.jsonl");
        let writer = RecordWriter::append(&path).unwrap();
        lines().iter().for_each(|line| writer.write(line).unwrap());
        assert_eq!(RecordLog::read(&path).unwrap(), collected(lines()));
    }

    #[test]
    fn a_log_cut_at_any_byte_loses_only_the_last_line() {
        let whole: Vec<u8> = lines()
            .iter()
            .flat_map(|line| [serde_json::to_vec(line).unwrap(), b"\n".to_vec()].concat())
            .collect();
        for cut in 0..whole.len() {
            let log = RecordLog::from_reader(&whole[..cut]).unwrap();
            let complete = whole[..cut].iter().filter(|&&byte| byte == b'\n').count();
            let samples = log.loads.len() + log.gpus.len() + log.links.len() + log.decisions.len();
            let held = log.runs.len() + log.requests.len() + samples + log.counters.len();
            // A record whose newline alone is missing is whole and may count.
            assert!(held == complete || held == complete + 1, "cut at {cut}: {held} of {complete}");
            assert!(held + log.skipped.len() <= complete + 1);
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_one_damage_and_no_record() {
        let record = serde_json::to_vec(&request(0, Outcome::Ok)).unwrap();
        let long = [vec![b' '; LINE_BYTES_MAX], record.clone()].concat();
        let log = RecordLog::from_reader(&[long, record].join(&b'\n')[..]).unwrap();
        assert_eq!(log.requests.len(), 1, "the second line's");
        assert_eq!(log.skipped, [(1, "longer than 1048576 bytes".to_owned())]);
    }

    #[test]
    fn appending_after_a_torn_line_keeps_the_new_record() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("records.jsonl");
        std::fs::write(&path, br#"{"kind":"request","arm":"lp"#).unwrap();
        RecordWriter::append(&path).unwrap().write(&request(7, Outcome::Ok)).unwrap();
        let log = RecordLog::read(&path).unwrap();
        assert_eq!(log.requests.len(), 1);
        assert_eq!(log.skipped.len(), 1);
        assert_eq!(log.skipped[0].0, 1);
    }

    #[test]
    fn a_missing_log_is_an_error_that_names_the_file() {
        let error = RecordLog::read(Path::new("no-such-file.jsonl")).unwrap_err();
        assert!(error.to_string().contains("no-such-file.jsonl"), "{error}");
    }

    #[test]
    fn a_long_detail_is_cut_at_a_character() {
        let failure = Failure::new(FailureKind::Garbage, "ä".repeat(300));
        assert!(failure.detail.len() <= Failure::DETAIL_BYTES_MAX);
        assert!(failure.detail.chars().all(|letter| letter == 'ä'));
    }
}
