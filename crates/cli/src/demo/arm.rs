//! One policy, from a cold start to its last record, or to the Ctrl-C before it.

use super::kill::Kill;
use super::system::{Shape, System};
use super::workload::Workload;
use forebay_results::output::Error;
use forebay_router::Policy;
use forebay_trace::record::{Counter, Line, RecordWriter, RequestRecord, RunInfo};
use forebay_trace::replay::{Options, Replayer};
use forebay_trace::report::LiveLine;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How long what runs may take to end in order after a cancellation. What does not, is killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Replays `workload` under `policy`, appends what came of it to `records`, and gives what there is
/// to say of it beside.
pub async fn run(
    policy: Policy,
    workload: &Workload,
    shape: &Shape,
    records: &RecordWriter,
    cancel: &CancellationToken,
) -> Result<Option<String>, Error> {
    // Engines may take minutes to start. Dropping what has started kills it.
    let Some(system) = cancel.run_until_cancelled(shape.start(policy)).await else { return Ok(None) };
    let replayed = replay(system?, policy, workload, shape, records, cancel);
    tokio::select! {
        said = replayed => said,
        () = too_late(cancel) => Ok(None),
    }
}

/// Comes back when a cancellation is [`END_LIMIT`] ago.
async fn too_late(cancel: &CancellationToken) {
    cancel.cancelled().await;
    tokio::time::sleep(END_LIMIT).await;
}

async fn replay(
    system: System,
    policy: Policy,
    workload: &Workload,
    shape: &Shape,
    records: &RecordWriter,
    cancel: &CancellationToken,
) -> Result<Option<String>, Error> {
    let (arm, host) = (policy.name(), shape.host());
    records.write(&Line::Run(run_info(arm, workload, shape)))?;
    let options = Options {
        arm: arm.to_owned(),
        model: host.profile.model.name.clone(),
        pacing: workload.pacing,
        clock_ratio: host.clock_ratio,
        vocab: host.profile.model.vocab,
        ..Options::default()
    };
    let replayer = Replayer::new(&system.url(), options)?;
    let live = LiveLine::new(arm, replayer.progress());
    let check = shape.check()?;
    let kill = Kill::halfway(system.cluster_to_harm(), workload.requests.len());
    let sink = |record: &RequestRecord| {
        kill.note(record);
        records.write(&Line::Request(record.clone()))
    };
    let replay = replayer.run(workload.requests.clone(), check, sink, cancel);
    let outcome = tokio::select! {
        outcome = live.during(replay) => outcome,
        failed = system.sample(arm, host.clock_ratio, records) => return Err(failed),
        failed = kill.carry_out(replayer.progress()) => return Err(failed),
    };
    let counts = system.counts().await?;
    let said = kill.words(arm, &counts);
    for (name, value) in counts.into_iter().chain(kill.counts()) {
        records.write(&Line::Counter(Counter { arm: arm.to_owned(), name: name.to_owned(), value }))?;
    }
    system.stop().await?;
    outcome?;
    Ok(said)
}

fn run_info(arm: &str, workload: &Workload, shape: &Shape) -> RunInfo {
    let parameter = |name: &str, value: String| (name.to_owned(), value);
    let parameters = vec![
        parameter("trace", workload.description.clone()),
        parameter("host", shape.description()),
        parameter("version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    RunInfo { arm: arm.to_owned(), parameters }
}
