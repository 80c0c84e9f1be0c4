//! The summary as text for a terminal, readable at 100 columns.

use super::notes::notes;
use super::summary::Summary;
use crate::quantile::Quantiles;
use crate::record::Choice;
use crate::units::{NONE, bytes, count, millis_or_none, percent_or_none, seconds_or_none};
use std::fmt::Write;

/// What a terminal is expected to have.
const COLUMNS: usize = 100;

/// A table under construction: the first column is aligned left, all others right.
struct Table {
    title: &'static str,
    rows: Vec<Vec<String>>,
}

/// The figures of `summary` as tables, with a line feed at the end.
pub fn terminal(summary: &Summary) -> String {
    let mut tables = vec![latencies(summary), answers(summary), sources(summary), classes(summary)];
    if summary.arms.iter().any(|arm| arm.decisions.is_some()) {
        tables.push(decisions(summary));
    }
    if summary.arms.iter().any(|arm| !arm.links.is_empty()) {
        tables.push(links(summary));
    }
    if summary.arms.iter().any(|arm| !arm.counters.is_empty()) {
        tables.push(counters(summary));
    }
    let mut text = tables.iter().map(Table::to_text).collect::<Vec<_>>().join("\n");
    for note in notes(summary) {
        let _ = writeln!(text, "\n{}", wrapped(&note));
    }
    text
}

fn latencies(summary: &Summary) -> Table {
    let mut table = Table::new(
        "Latency in model seconds (TPOT in milliseconds)",
        &["", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "E2E p50", "p90", "p99"],
    );
    for arm in &summary.arms {
        let (ttft, tpot, e2e) = (arm.ttft_s, arm.tpot_s, arm.e2e_s);
        table.row([
            arm.arm.clone(),
            seconds_or_none(ttft.p50),
            seconds_or_none(ttft.p90),
            seconds_or_none(ttft.p99),
            millis_or_none(tpot.p50),
            millis_or_none(tpot.p90),
            millis_or_none(tpot.p99),
            seconds_or_none(e2e.p50),
            seconds_or_none(e2e.p90),
            seconds_or_none(e2e.p99),
        ]);
    }
    table
}

fn answers(summary: &Summary) -> Table {
    let mut table = Table::new(
        "Requests, and tokens of the answers that did not fail",
        &["", "requests", "failed", "asked", "got", "shorter than asked"],
    );
    for arm in &summary.arms {
        table.row([
            arm.arm.clone(),
            count(arm.requests as u64),
            count(arm.failed() as u64),
            arm.asked_tokens.map_or_else(|| NONE.into(), count),
            count(arm.output_tokens),
            arm.asked_tokens.map_or_else(|| NONE.into(), |_| count(arm.short_answers as u64)),
        ]);
    }
    table
}

fn sources(summary: &Summary) -> Table {
    let mut table = Table::new(
        "Prompt tokens by source (gpu where an engine names none), in percent, and wrong tokens",
        &[
            "",
            "hit rate",
            "gpu",
            "memory",
            "ssd",
            "peer",
            "computed",
            "prompt tokens",
            "wrong tokens",
            "checked",
        ],
    );
    for arm in &summary.arms {
        let sources = arm.sources;
        let share =
            |tokens: u64| percent_or_none(sources.hit_rate().map(|_| tokens as f64 / sources.known() as f64));
        table.row([
            arm.arm.clone(),
            percent_or_none(sources.hit_rate()),
            share(sources.gpu),
            share(sources.memory),
            share(sources.ssd),
            share(sources.peer),
            share(sources.computed),
            count(sources.known() + sources.unreported),
            arm.wrong.map_or_else(|| "unchecked".into(), |wrong| count(wrong.tokens)),
            arm.wrong.map_or_else(|| "0".into(), |wrong| count(wrong.checked_requests as u64)),
        ]);
    }
    table
}

fn classes(summary: &Summary) -> Table {
    let mut table = Table::new(
        "Requests by executed tokens (input less cached), and their TTFT in model seconds",
        &["", "< 5k", "p50", "p90", "5-20k", "p50", "p90", "20-50k", "p50", "p90", "> 50k", "p50", "p90"],
    );
    for arm in &summary.arms {
        let figures = arm.classes.iter().flat_map(|class| {
            let Quantiles { p50, p90, .. } = class.ttft_s;
            [count(class.requests as u64), seconds_or_none(p50), seconds_or_none(p90)]
        });
        table.row(std::iter::once(arm.arm.clone()).chain(figures));
    }
    table
}

fn decisions(summary: &Summary) -> Table {
    let mut table = Table::new(
        "Decisions of the router, how far its predictions of TTFT were off, and its regret, in seconds",
        &[
            "",
            "all",
            "stay",
            "elsewhere",
            "new",
            "load",
            "refused",
            "off p50",
            "p90",
            "regret p50",
            "p90",
            "p99",
        ],
    );
    for arm in &summary.arms {
        let Some(decisions) = &arm.decisions else { continue };
        let mut cells = vec![arm.arm.clone(), count(decisions.decisions as u64)];
        cells.extend(Choice::ALL.map(|choice| count(decisions.count(choice) as u64)));
        let (off, regret) = (decisions.ttft_off_s, decisions.regret_s);
        cells.extend([off.p50, off.p90, regret.p50, regret.p90, regret.p99].map(seconds_or_none));
        table.row(cells);
    }
    table
}

fn links(summary: &Summary) -> Table {
    let mut table = Table::new("Bytes moved", &["", "links", "bytes", "lots", "busiest link", "bytes"]);
    for arm in &summary.arms {
        let Some(busiest) = arm.links.iter().max_by_key(|link| link.bytes) else { continue };
        table.row([
            arm.arm.clone(),
            count(arm.links.len() as u64),
            bytes(arm.links.iter().map(|link| link.bytes).sum()),
            count(arm.links.iter().map(|link| link.lots).sum()),
            busiest.link.clone(),
            bytes(busiest.bytes),
        ]);
    }
    table
}

fn counters(summary: &Summary) -> Table {
    let head: Vec<&str> =
        std::iter::once("").chain(summary.arms.iter().map(|arm| arm.arm.as_str())).collect();
    let mut table = Table::new("Counted", &head);
    for name in summary.counter_names() {
        let values = summary
            .arms
            .iter()
            .map(|arm| arm.counters.get(name).map_or_else(|| NONE.into(), |&value| count(value)));
        table.row(std::iter::once(name.to_owned()).chain(values));
    }
    table
}

/// A sentence on as many lines as it needs.
fn wrapped(sentence: &str) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in sentence.split(' ') {
        let letters = word.chars().count();
        if column > 0 && column + 1 + letters > COLUMNS {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += letters;
    }
    text
}

impl Table {
    fn new(title: &'static str, head: &[&str]) -> Table {
        Table { title, rows: vec![head.iter().map(|&name| name.to_owned()).collect()] }
    }

    fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn to_text(&self) -> String {
        let columns = self.rows[0].len();
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = format!("{}\n", self.title);
        for row in &self.rows {
            let mut line = format!("{:<width$}", row[0], width = widths[0]);
            for (cell, width) in row.iter().zip(&widths).skip(1) {
                let _ = write!(line, "  {cell:>width$}");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}
