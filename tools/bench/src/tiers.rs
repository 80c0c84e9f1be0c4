//! `forebay bench tiers`: what each admission policy makes of the SSD on whole traces, beside what
//! no cache could exceed. Nothing is timed: every run gives the same figures. This file knows
//! traces and rows; what tiers do is `forebay-trace`'s to say.

use crate::output::{CommandResult, Output, finish};
use forebay_results::{Results, Row};
use forebay_store::admission::Policy;
use forebay_trace::format::{ReadOptions, Rereadable};
use forebay_trace::info::info;
use forebay_trace::tiers::{ModelCost, TierRow, TierSize, TierSizes, TierStudy};
use std::path::{Path, PathBuf};

/// Of the trace's distinct blocks.
const SIZES: TierSizes = TierSizes { memory: TierSize::Percent(2.0), ssd: TierSize::Percent(20.0) };

/// Arguments of `forebay bench tiers`.
#[derive(clap::Args)]
pub struct Args {
    /// Traces, in any format that `forebay trace info` reads
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let study = TierStudy {
        sizes: vec![SIZES],
        policies: Policy::NAMES.map(|(policy, _)| policy).to_vec(),
        model: ModelCost::DENSE_8B,
        endurance_bytes_per_day: None,
    };
    let mut results = Results::new("tiers");
    for trace in &args.traces {
        let rereadable = Rereadable::new(trace)?;
        let open = || rereadable.open(ReadOptions::default());
        let prefix = info(&mut open()?, &[])?.prefix;
        let prefix =
            prefix.ok_or_else(|| format!("{}: the trace says nothing about prefixes", trace.display()))?;
        let report = study.run(open()?, &prefix)?;
        results.rows.extend(report.rows.iter().flat_map(|row| rows(trace, row, prefix.max_hit_blocks)));
    }
    finish(&results, &args.output)
}

/// The figures of one policy. `most_hits` is the share of blocks that a cache without limit would
/// have held.
fn rows(trace: &Path, row: &TierRow, most_hits: f64) -> [Row; 4] {
    let trace = trace.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
    let trace = trace.strip_suffix("_trace").unwrap_or(&trace);
    let name = |figure| format!("tiers.{trace}.{}.{figure}", row.admission);
    let percent = |figure, share: f64| Row::of_runs(name(figure), "%", &[share * 100.0]);
    [
        percent("hit_percent", row.memory_hits + row.ssd_hits).with_ceiling(most_hits * 100.0),
        percent("ssd_hit_percent", row.ssd_hits),
        percent("flop_saved_percent", row.flop_saved),
        Row::of_runs(name("written_gib"), "GiB", &[row.written_bytes as f64 / (1_u64 << 30) as f64]),
    ]
}
