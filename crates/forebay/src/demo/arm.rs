//! One policy, from a cold start to its last record. It knows what is sampled and counted; it must never know what the
//! figures mean.

use super::host::{Host, HostShape};
use super::workload::Workload;
use forebay_router::Policy;
use forebay_trace::record::{Counter, Line, LinkSample, LoadSample, RecordWriter, RunInfo};
use forebay_trace::replay::{Options, Replayer};
use forebay_trace::report::LiveLine;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Real time between two samples of load and links.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Replays `workload` under `policy` and appends what came of it to `records`.
pub async fn run(
    policy: Policy,
    workload: &Workload,
    shape: &HostShape,
    records: &RecordWriter,
    cancel: &CancellationToken,
) -> Result<(), Error> {
    let arm = policy.name();
    let host = shape.start(policy).await?;
    let found_chunks = host.store.disk_stat().map(|stat| stat.ssd.tier.counters.chunks as u64);
    records.write(&Line::Run(run_info(arm, workload, shape)))?;
    let options = Options {
        arm: arm.to_owned(),
        model: shape.profile.model.name.clone(),
        pacing: workload.pacing,
        clock_ratio: shape.clock_ratio,
        vocab: shape.profile.model.vocab,
        ..Options::default()
    };
    let replayer = Replayer::new(&format!("http://{}", host.router.addr()), options)?;
    let live = LiveLine::new(arm, replayer.progress());
    let check = Arc::new(shape.oracle()?);
    let sink = |record: &_| records.write(&Line::Request(Clone::clone(record)));
    let replay = replayer.run(workload.requests.clone(), Some(check), sink, cancel);
    let outcome = tokio::select! {
        outcome = live.during(replay) => outcome,
        failed = sample(arm, &host, shape.clock_ratio, records) => return Err(failed),
    };
    count(arm, &host, found_chunks, records)?;
    host.stop().await?;
    outcome?;
    Ok(())
}

fn run_info(arm: &str, workload: &Workload, shape: &HostShape) -> RunInfo {
    let parameter = |name: &str, value: String| (name.to_owned(), value);
    let parameters = vec![
        parameter("trace", workload.description.clone()),
        parameter("host", shape.description()),
        parameter("version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    RunInfo { arm: arm.to_owned(), parameters }
}

/// Samples until it cannot write any more.
async fn sample(arm: &str, host: &Host, clock_ratio: f64, records: &RecordWriter) -> Error {
    let start = Instant::now();
    let mut ticks = tokio::time::interval(SAMPLE_EVERY);
    loop {
        ticks.tick().await;
        let at_s = start.elapsed().as_secs_f64() * clock_ratio;
        if let Err(error) = write_samples(arm, host, at_s, records) {
            return error;
        }
    }
}

fn write_samples(arm: &str, host: &Host, at_s: f64, records: &RecordWriter) -> Result<(), Error> {
    for (number, engine) in host.engines.iter().enumerate() {
        let stats = engine.stats();
        records.write(&Line::Load(LoadSample {
            arm: arm.to_owned(),
            at_s,
            instance: format!("engine-{number}"),
            running: stats.running as u32,
            waiting: stats.waiting as u32,
            kv_usage: stats.blocks_used as f64 / stats.blocks_total.max(1) as f64,
        }))?;
    }
    for link in host.mover.telemetry()?.links {
        let (bytes, lots) = (link.bytes, link.lots);
        records.write(&Line::Link(LinkSample { arm: arm.to_owned(), at_s, link: link.name, bytes, lots }))?;
    }
    Ok(())
}

/// What the parts counted themselves, at the end of an arm.
fn count(arm: &str, host: &Host, found_chunks: Option<u64>, records: &RecordWriter) -> Result<(), Error> {
    let stats: Vec<_> = host.engines.iter().map(|engine| engine.stats()).collect();
    let sum = |of: fn(&forebay_engine::stats::Stats) -> u64| stats.iter().map(of).sum();
    let mut counters = vec![
        ("chunks loaded", sum(|stats| stats.store.loaded_chunks)),
        ("chunks stored", sum(|stats| stats.store.stored_chunks)),
        (super::rows::CORRUPTIONS_CAUGHT, sum(|stats| stats.store.corrupt_chunks)),
        ("bits flipped", host.flipped_bits.load(Ordering::Relaxed)),
        ("chunks evicted", host.store.stat().evicted),
        ("preemptions", sum(|stats| stats.scheduler.preemptions)),
    ];
    if let (Some(found_chunks), Some(stat)) = (found_chunks, host.store.disk_stat()) {
        counters.extend([
            (super::rows::SSD_FOUND, found_chunks),
            ("chunks loaded from SSD", sum(|stats| stats.store.disk_chunks)),
            ("chunks written to SSD", stat.write_back.written),
            ("chunks promoted to memory", stat.promotions.promoted),
        ]);
    }
    for (name, value) in counters {
        records.write(&Line::Counter(Counter { arm: arm.to_owned(), name: name.to_owned(), value }))?;
    }
    Ok(())
}
