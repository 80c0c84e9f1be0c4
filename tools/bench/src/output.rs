//! How a benchmark ends: its rows are printed and written, or it fails.

pub use forebay_results::output::{CommandResult, Error};
use forebay_results::{Results, Row};
use std::path::PathBuf;

/// What a part of a benchmark gives.
pub type Outcome<T> = Result<T, Error>;

/// Where results go.
#[derive(clap::Args)]
pub struct Output {
    /// Write the results object to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Prints the rows, and writes them where that was asked for.
pub fn finish(results: &Results, output: &Output) -> CommandResult {
    println!(
        "{:<28} {:>10} {:>10} {:>10} {:>10} {:>6} {:>10}  peer",
        "row", "median", "min", "max", "ceiling", "ratio", "cpu_s/GB"
    );
    results.rows.iter().for_each(print_row);
    match &output.json {
        Some(file) => Ok(results.write(file)?),
        None => Ok(()),
    }
}

fn print_row(row: &Row) {
    let number = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.3}"));
    let peer = row.peer.as_ref();
    println!(
        "{:<28} {:>10.3} {:>10.3} {:>10.3} {:>10} {:>6} {:>10}  {} [{}]",
        row.name,
        row.value,
        row.min,
        row.max,
        number(row.ceiling),
        number(row.ratio),
        number(row.cpu_s_per_gb),
        peer.map_or_else(|| "-".into(), |peer| format!("{} {} {:.3}", peer.name, peer.version, peer.value)),
        row.unit,
    );
}
