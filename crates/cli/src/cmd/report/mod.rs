//! `forebay report`: what was not computed, against the price of the memory and SSDs that it was
//! kept in. `page` reads metrics, `sums` adds up, `html` makes a page. This file gathers what is
//! summed.

mod html;
mod page;
mod source;
mod sums;

use forebay_results::output::{CommandResult, Error};
use forebay_steps::{Launch, Profile, StepModel};
use forebay_trace::replay::Transport;
use page::Series;
use source::{EngineSource, Source};
use std::path::PathBuf;
use std::time::Duration;
use sums::{EnginePages, Prices, Report};

const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Arguments of `forebay report`.
#[derive(clap::Args)]
pub struct Args {
    /// An engine's metrics: http://HOST:PORT or a saved page; with ",before=FILE" the page that was
    /// saved when the time began, and with ",tenant=NUMBER" whose requests it has; repeat for each
    #[arg(long, value_name = "SOURCE", required = true, value_parser = source::engine)]
    engine: Vec<EngineSource>,
    /// A node's metrics: http://HOST:PORT or a saved page; repeat for each
    #[arg(long, value_name = "SOURCE", value_parser = source::source)]
    node: Vec<Source>,
    /// Hours between the two pages of each engine, or since it started
    #[arg(long, value_name = "HOURS", value_parser = source::positive)]
    hours: f64,
    /// Tokens that a GPU of such an engine computes in a second of prefill
    #[arg(long, value_name = "TOKENS", value_parser = source::positive, required_unless_present = "profile")]
    prefill_tokens_per_gpu_second: Option<f64>,
    /// Take that from a profile instead: a shipped one, or a file as `forebay calibrate` writes it
    #[arg(long, value_name = "NAME_OR_FILE", conflicts_with = "prefill_tokens_per_gpu_second")]
    profile: Option<String>,
    /// Price of memory, such as 0.004/GiB-hour or 2.9/GiB-month
    #[arg(long, value_name = "PRICE", value_parser = source::per_gib_hour)]
    memory_price: f64,
    /// Price of SSDs, in the same units
    #[arg(long, value_name = "PRICE", value_parser = source::per_gib_hour, default_value = "0/GiB-hour")]
    ssd_price: f64,
    /// Price of a GPU, such as 2.5/hour
    #[arg(long, value_name = "PRICE", value_parser = source::per_hour)]
    gpu_price: f64,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as a page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub fn run(args: Args) -> CommandResult {
    let rate = args.rate()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (engines, nodes) = runtime.block_on(args.pages())?;
    let prices = Prices {
        memory_per_gib_hour: args.memory_price,
        ssd_per_gib_hour: args.ssd_price,
        per_gpu_hour: args.gpu_price,
    };
    let report = sums::report(&engines, &nodes, args.hours, rate, prices);
    print(&report);
    if let Some(file) = &args.json {
        write(file, &(serde_json::to_string_pretty(&report)? + "\n"))?;
    }
    if let Some(file) = &args.html {
        write(file, &html::page(&report))?;
    }
    Ok(())
}

impl Args {
    /// Tokens of prefill in a second: what is given, or what the profile says of a full step.
    fn rate(&self) -> Result<f64, Error> {
        let Some(name) = &self.profile else { return Ok(self.prefill_tokens_per_gpu_second.unwrap_or(1.0)) };
        let profile = Profile::find(name)?;
        let tokens = profile.scheduler.max_batched_tokens as u64;
        Ok(tokens as f64 / StepModel::new(&profile, Launch::Eager).prefill_us(tokens, 0) * 1e6)
    }

    async fn pages(&self) -> Result<(Vec<EnginePages>, Vec<Vec<Series>>), Error> {
        let transport = Transport::new(None, CONNECT_LIMIT)?;
        let (mut engines, mut nodes) = (Vec::new(), Vec::new());
        for EngineSource { now, before, tenant } in &self.engine {
            let before = match before {
                Some(file) => Source::File(file.clone()).read(&transport).await?,
                None => Vec::new(),
            };
            engines.push(EnginePages { tenant: tenant.clone(), now: now.read(&transport).await?, before });
        }
        for node in &self.node {
            nodes.push(node.read(&transport).await?);
        }
        Ok((engines, nodes))
    }
}

fn print(report: &Report) {
    for row in &report.rows {
        println!(
            "{} tenant {} {:<6} {:>14.0} tokens {:>12.1} GPU-seconds {:>10.2}",
            row.model, row.tenant, row.tier, row.tokens, row.gpu_seconds, row.worth
        );
    }
    println!(
        "saved by the nodes {:.2}; memory {:.2} ({:.1} GiB), SSD {:.2} ({:.1} GiB) in {} h",
        report.saved_worth,
        report.memory_cost,
        report.memory_gib,
        report.ssd_cost,
        report.ssd_gib,
        report.hours
    );
}

fn write(file: &std::path::Path, text: &str) -> Result<(), Error> {
    Ok(std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?)
}
