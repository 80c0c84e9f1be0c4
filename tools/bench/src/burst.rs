//! `forebay bench burst`: 120 requests with one prompt, which one of four emulated engines has,
//! sent within six seconds of model time, for each routing policy. It measures how long they wait,
//! and whether they queue at one engine while another has nothing to do.

use crate::output::{CommandResult, Outcome, Output, finish};
use forebay_emulator::{Engine, EngineConfig, EngineHandle, namespace};
use forebay_results::{Results, Row};
use forebay_router::{Backend, EngineModel, Policy, Router, RouterConfig};
use forebay_steps::Profile;
use forebay_trace::quantile::Quantiles;
use forebay_trace::record::RequestRecord;
use forebay_trace::replay::{CancellationToken, Options, Pacing, Replayer};
use forebay_trace::request::TraceRequest;
use std::time::Duration;

const ENGINES: usize = 4;

/// Requests that an engine computes at once.
const PLACES: usize = 16;

const REQUESTS: u32 = 120;
const EVERY_US: u64 = 50_000;
const BLOCK_TOKENS: u32 = 64;
const BLOCKS: u32 = 117;
const ANSWER_TOKENS: u32 = 100;

/// When the burst begins: the first engine has computed the prompt by then.
const BURST_US: u64 = 10_000_000;

/// Model seconds in a real second.
const CLOCK_RATIO: f64 = 10.0;

/// Real time between two looks at the engines.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Arguments of `forebay bench burst`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of bursts for each policy
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Routing policies to compare
    #[arg(long, value_delimiter = ',', default_values_t = Policy::ALL)]
    policies: Vec<Policy>,
    #[command(flatten)]
    output: Output,
}

pub fn run(args: Args) -> CommandResult {
    let mut results = Results::new("burst");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    for &policy in &args.policies {
        let bursts: Outcome<Vec<Burst>> = (0..args.runs).map(|_| runtime.block_on(burst(policy))).collect();
        results.rows.extend(rows(policy, &bursts?));
    }
    finish(&results, &args.output)
}

/// What came of one burst.
struct Burst {
    /// Model seconds to the first token.
    ttft_p50_s: f64,
    ttft_p90_s: f64,
    /// Of all looks at the engines, those that saw one without a place and a queue, and one without
    /// work.
    idle_while_queued: f64,
}

fn rows(policy: Policy, bursts: &[Burst]) -> [Row; 3] {
    let row = |figure: &str, unit, pick: fn(&Burst) -> f64| {
        let runs: Vec<f64> = bursts.iter().map(pick).collect();
        Row::of_runs(format!("route.burst{REQUESTS}.{figure}.{policy}"), unit, &runs)
    };
    [
        row("ttft_p50_s", "s", |burst| burst.ttft_p50_s),
        row("ttft_p90_s", "s", |burst| burst.ttft_p90_s),
        row("idle_while_queued", "1", |burst| burst.idle_while_queued),
    ]
}

async fn burst(policy: Policy) -> Outcome<Burst> {
    let config = engine_config()?;
    let mut engines = Vec::new();
    for _ in 0..ENGINES {
        engines.push(Engine::spawn(config.clone(), None).await?);
    }
    let backends = engines.iter().enumerate().map(|(number, engine)| {
        Backend::new(format!("engine-{number}"), format!("http://{}", engine.address()))
    });
    let model = EngineModel::new(&config.profile, config.launch);
    let listen = ([127, 0, 0, 1], 0).into();
    let router = Router::spawn(RouterConfig::new(listen, backends.collect(), policy, model))?;
    let options = Options {
        model: config.model.clone(),
        pacing: Pacing::Open,
        clock_ratio: CLOCK_RATIO,
        vocab: config.profile.model.vocab,
        ..Options::default()
    };
    let replayer = Replayer::new(&format!("http://{}", router.addr()), options)?;
    let mut waits = Vec::new();
    let sink = |record: &RequestRecord| {
        waits.extend(record.ttft_s.filter(|_| record.session != FIRST));
        Ok(())
    };
    let cancel = CancellationToken::new();
    let replay = replayer.run(requests(), None, sink, &cancel);
    let (done, idle_while_queued) = look_during(&engines, replay).await;
    done?;
    router.shutdown().await;
    for engine in engines {
        engine.shutdown(Duration::ZERO).await;
    }
    if waits.len() != REQUESTS as usize {
        return Err(format!("{} of {REQUESTS} requests were answered", waits.len()).into());
    }
    let waits = Quantiles::of(waits);
    let [ttft_p50_s, ttft_p90_s] = [waits.p50, waits.p90].map(|wait_s| wait_s.unwrap_or(0.0));
    Ok(Burst { ttft_p50_s, ttft_p90_s, idle_while_queued })
}

fn engine_config() -> Outcome<EngineConfig> {
    let mut profile = Profile::shipped(Profile::DEFAULT)?;
    profile.scheduler.max_seqs = PLACES;
    let namespace = namespace(&profile).key();
    Ok(EngineConfig { clock_ratio: CLOCK_RATIO, ..EngineConfig::new(profile, namespace) })
}

/// The session that comes before the burst, and computes the prompt.
const FIRST: &str = "first";

fn requests() -> Vec<TraceRequest> {
    let request = |session: String, arrival_us: u64| TraceRequest {
        session,
        arrival_us,
        input_tokens: BLOCKS * BLOCK_TOKENS,
        output_tokens: ANSWER_TOKENS,
        block_tokens: BLOCK_TOKENS,
        blocks: (0..u64::from(BLOCKS)).collect(),
        ..TraceRequest::default()
    };
    let burst = (0..REQUESTS)
        .map(|number| request(format!("burst-{number}"), BURST_US + u64::from(number) * EVERY_US));
    [request(FIRST.to_owned(), 0)].into_iter().chain(burst).collect()
}

/// Looks at the engines while the replay goes on. Gives its outcome, and
/// [`Burst::idle_while_queued`].
async fn look_during<T>(engines: &[EngineHandle], replay: impl Future<Output = T>) -> (T, f64) {
    let (mut looks, mut bad) = (0_u32, 0_u32);
    let mut replay = std::pin::pin!(replay);
    loop {
        tokio::select! {
            outcome = &mut replay => return (outcome, f64::from(bad) / f64::from(looks.max(1))),
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let stats: Vec<_> = engines.iter().map(EngineHandle::stats).collect();
        let queues = stats.iter().any(|stats| stats.running >= PLACES && stats.waiting > 0);
        let idles = stats.iter().any(|stats| stats.running + stats.waiting == 0);
        looks += 1;
        bad += u32::from(queues && idles);
    }
}
