//! What came of a study, and its table for the terminal, at most 100 columns wide.

use serde::Serialize;
use std::fmt::{self, Display, Formatter};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierReport {
    pub kv_bytes_per_token: u32,
    /// Sizes by policies, in the order of the study.
    pub rows: Vec<TierRow>,
}

/// What tiers of given sizes did under one policy. Shares are of 1; hits are blocks that were held
/// together with all before them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TierRow {
    /// The sizes, as they were asked for.
    pub tiers: String,
    pub memory_bytes: u64,
    pub ssd_bytes: u64,
    pub admission: String,
    /// Blocks found in memory, of all blocks.
    pub memory_hits: f64,
    /// Blocks found on the SSD and not in memory, of all blocks.
    pub ssd_hits: f64,
    /// FLOP of prefill that hits of both tiers saved, of all FLOP of prefill.
    pub flop_saved: f64,
    /// Written to the SSD.
    pub written_bytes: u64,
    /// Found on the SSD and not in memory.
    pub ssd_hit_bytes: u64,
    /// Not written for want of endurance budget.
    pub over_budget_bytes: u64,
    /// The requests during which the adaptive policy admitted all chunks, of all requests.
    pub admitted_all: Option<f64>,
}

impl Display for TierReport {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let mut tiers = None;
        for row in &self.rows {
            if tiers.replace(&row.tiers).is_none_or(|before| *before != row.tiers) {
                self.head(row, out)?;
            }
            row.text(out)?;
        }
        Ok(())
    }
}

impl TierReport {
    fn head(&self, row: &TierRow, out: &mut Formatter<'_>) -> fmt::Result {
        let sizes = [row.memory_bytes, row.ssd_bytes].map(gigabytes).join(" and ");
        writeln!(out, "\n{}: {sizes} at {} bytes a token", row.tiers, self.kv_bytes_per_token)?;
        write!(out, "{:<22}{:>9}{:>9}{:>9}", "admission", "memory", "ssd", "both")?;
        writeln!(out, "{:>12}{:>12}{:>13}{:>13}", "FLOP saved", "written", "hit/written", "over budget")
    }
}

impl TierRow {
    /// How often a byte that was written was found on the SSD; 0 when none was written.
    pub fn hits_per_written_byte(&self) -> f64 {
        self.ssd_hit_bytes as f64 / self.written_bytes.max(1) as f64
    }

    fn text(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        let name = match self.admitted_all {
            Some(share) => format!("{} ({:.0} % all)", self.admission, share * 100.0),
            None => self.admission.clone(),
        };
        write!(out, "{name:<22}{:>9}{:>9}", percent(self.memory_hits), percent(self.ssd_hits))?;
        write!(out, "{:>9}{:>12}", percent(self.memory_hits + self.ssd_hits), percent(self.flop_saved))?;
        write!(out, "{:>12}{:>13.2}", gigabytes(self.written_bytes), self.hits_per_written_byte())?;
        writeln!(out, "{:>13}", gigabytes(self.over_budget_bytes))
    }
}

fn gigabytes(bytes: u64) -> String {
    let gigabytes = bytes as f64 / 1e9;
    let digits = if gigabytes < 100.0 { 1 } else { 0 };
    format!("{gigabytes:.digits$} GB")
}
