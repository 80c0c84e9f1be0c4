//! The figures of tiers as a table for the terminal, at most 100 columns wide.

use super::{TierReport, TierRow};
use std::fmt::{self, Display, Formatter};

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
