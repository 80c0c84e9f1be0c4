//! The figures of a trace as a table for the terminal, at most 100 columns wide.

use super::{Info, LoadInfo, PrefixInfo, SessionInfo, ValueSummary};
use crate::units::count;
use std::fmt::{self, Display, Formatter};

impl Display for Info {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        self.head(out)?;
        writeln!(
            out,
            "\n{:<22}{:>10}{:>12}{:>12}{:>12}{:>12}{:>12}",
            "", "n", "mean", "p50", "p90", "p99", "max"
        )?;
        row(out, "input tokens", &self.input_tokens)?;
        row(out, "output tokens", &self.output_tokens)?;
        if let Some(prefix) = &self.prefix {
            row(out, "new input tokens", &prefix.new_tokens)?;
        }
        if let Some(sessions) = &self.sessions {
            sessions.rows(out)?;
        }
        if let Some(load) = &self.load {
            load.rows(out)?;
        }
        if let Some(sessions) = &self.sessions {
            sessions.text(out)?;
        }
        if let Some(load) = &self.load {
            load.text(out)?;
        }
        if let Some(prefix) = &self.prefix {
            writeln!(out)?;
            prefix.text(out, self.sessions.is_some())?;
        }
        Ok(())
    }
}

impl Info {
    fn head(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{} requests", grouped(self.requests as f64))?;
        match &self.sessions {
            Some(sessions) => write!(out, " in {} sessions", grouped(sessions.sessions as f64))?,
            None => write!(out, ", no sessions recorded")?,
        }
        if let Some(SessionInfo { sub_agents: 1.., .. }) = &self.sessions {
            let sub_agents = self.sessions.as_ref().map_or(0, |sessions| sessions.sub_agents);
            write!(out, " and {} of sub-agents", grouped(sub_agents as f64))?;
        }
        writeln!(out, ", {} ({} format)", duration(self.span_s), self.format)?;
        write!(
            out,
            "{:.3} requests/s, {:.1} input tokens per output token, ",
            self.requests_per_s, self.input_per_output
        )?;
        writeln!(out, "prefill share {}", percent(self.prefill_share))?;
        let fits = self
            .fits
            .iter()
            .map(|fit| format!("{} in {} tokens", percent(fit.share), grouped(fit.context_tokens.into())));
        writeln!(out, "prompts that fit: {}", fits.collect::<Vec<_>>().join(", "))?;
        if self.skipped_lines > 0 {
            writeln!(out, "{} bad lines left out", grouped(self.skipped_lines as f64))?;
        }
        if self.out_of_order > 0 {
            writeln!(out, "{} requests out of order", grouped(self.out_of_order as f64))?;
        }
        Ok(())
    }
}

impl SessionInfo {
    fn rows(&self, out: &mut Formatter<'_>) -> fmt::Result {
        row(out, "turns per session", &self.turns)?;
        row(out, "first input tokens", &self.first_input_tokens)?;
        row(out, "last input tokens", &self.last_input_tokens)?;
        optional_row(out, "growth per turn", self.growth_tokens.as_ref())?;
        optional_row(out, "system + tools tokens", self.system_tokens.as_ref())?;
        optional_row(out, "think time s", self.think_s.as_ref())?;
        optional_row(out, "service time s", self.service_s.as_ref())?;
        row(out, "session length s", &self.length_s)
    }

    fn text(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let (resets, continuations) = (grouped(self.resets as f64), grouped(self.continuations as f64));
        writeln!(
            out,
            "\nresets (prompt below 0.7 of the one before): {resets} of {continuations} continuations"
        )?;
        writeln!(
            out,
            "the largest tenth of the sessions has {} of the input tokens",
            percent(self.largest_tenth)
        )
    }
}

impl LoadInfo {
    fn rows(&self, out: &mut Formatter<'_>) -> fmt::Result {
        row(out, "open sessions", &self.open_sessions)?;
        row(out, "tokens they hold", &self.held_tokens)
    }

    fn text(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let engines = self.imbalance.iter().map(|of| format!("{:.2} of {}", of.busiest, of.engines));
        let engines = engines.collect::<Vec<_>>().join(", ");
        writeln!(out, "sessions that stay where they are put, busiest engine by the mean: {engines}")
    }
}

impl PrefixInfo {
    fn text(&self, out: &mut Formatter<'_>, sessions_recorded: bool) -> fmt::Result {
        writeln!(
            out,
            "blocks of {} tokens: {} distinct, {} of them reused; {} distinct first blocks",
            self.block_tokens,
            grouped(self.distinct_blocks as f64),
            percent(self.reused_blocks),
            grouped(self.distinct_first_blocks as f64)
        )?;
        writeln!(
            out,
            "new tokens with an infinite cache: WARM < 5k {}, MEDIUM 5-20k {}, HEAVY > 20k {}",
            percent(self.warm),
            percent(self.medium),
            percent(self.heavy)
        )?;
        write!(out, "{} of the requests hit anything", percent(self.requests_with_hit))?;
        if sessions_recorded {
            let (within, across) =
                (percent(self.reuse.within_session), percent(self.reuse.across_sessions()));
            write!(out, "; of all blocks {within} are reused within a session, {across} across")?;
        }
        writeln!(out)?;
        writeln!(out, "\n{:<34}{:>12}{:>12}", "one shared cache, LRU", "of blocks", "of tokens")?;
        for cache in &self.caches {
            let name = format!("{} tokens", grouped(cache.capacity_tokens as f64));
            writeln!(out, "{name:<34}{:>12}{:>12}", percent(cache.hit_blocks), percent(cache.hit_tokens))?;
        }
        writeln!(
            out,
            "{:<34}{:>12}{:>12}",
            "infinite",
            percent(self.max_hit_blocks),
            percent(self.max_hit_tokens)
        )
    }
}

fn optional_row(out: &mut Formatter<'_>, name: &str, values: Option<&ValueSummary>) -> fmt::Result {
    values.map_or(Ok(()), |values| row(out, name, values))
}

fn row(out: &mut Formatter<'_>, name: &str, values: &ValueSummary) -> fmt::Result {
    let ValueSummary { count: values_count, mean, p50, p90, p99, max } = *values;
    write!(out, "{name:<22}{:>10}", grouped(values_count as f64))?;
    [mean, p50, p90, p99, max].iter().try_for_each(|&value| write!(out, "{:>12}", brief(value)))?;
    writeln!(out)
}

/// One decimal below 100, none above.
fn brief(value: f64) -> String {
    if value.abs() < 100.0 && value.fract() != 0.0 { format!("{value:.1}") } else { grouped(value) }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A whole number with commas between thousands.
fn grouped(value: f64) -> String {
    let sign = if value <= -0.5 { "-" } else { "" };
    format!("{sign}{}", count(value.abs().round_ties_even() as u64))
}

fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.1} s"),
        ..7_200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3_600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::{brief, duration, grouped};

    #[test]
    fn numbers_are_easy_to_read() {
        assert_eq!([0.0, 999.4, 1_000.0, -1_234_567.0].map(grouped), ["0", "999", "1,000", "-1,234,567"]);
        assert_eq!([0.25, 8.0, 129.04].map(brief), ["0.2", "8", "129"]);
        assert_eq!([3.0, 3_537.0, 440_000.0].map(duration), ["3.0 s", "59.0 min", "122.2 h"]);
    }
}
