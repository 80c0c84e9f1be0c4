//! `forebay bench ring`: requests in memory that a producer and a consumer share. Round trips of
//! requests that ask for nothing, and how many contexts a second one thread takes and ends, posted
//! by a thread of the host, and by a GPU where there is one. The consumer compares every context
//! with what it must be. Nothing is read or written beside.

mod gpu;

use crate::output::{CommandResult, Outcome, Output, finish};
use crate::timing::{Cost, cost};
use forebay_results::{Results, Row};
use forebay_ring::memory::RingMemory;
use forebay_ring::{
    CONTEXTS_MAX, Consumer, Context, ContextResult, Layout, NotPosted, Op, Producer, Request, Taken,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// As many slots of each kind as a node gives.
const SLOTS: u16 = 64;
const EPOCH: u64 = 1;
/// Contexts of requests of which the rate is taken.
const SIZES: [u16; 3] = [16, 64, CONTEXTS_MAX];
const ROUND_TRIPS: usize = 20_000;
/// One that takes longer has not ended.
const LIMIT: Duration = Duration::from_secs(60);

/// Arguments of `forebay bench ring`.
#[derive(clap::Args)]
pub struct Args {
    /// Runs of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Contexts in a run
    #[arg(long, default_value_t = 20_000_000, value_parser = clap::value_parser!(u64).range(1_000..=10_000_000_000))]
    contexts: u64,
    /// The GPU that publishes requests too, where there is one
    #[arg(long, default_value_t = 0)]
    gpu: u16,
    #[command(flatten)]
    output: Output,
}

/// Runs the benchmark.
pub fn run(args: Args) -> CommandResult {
    let mut results = Results::new("ring");
    let mut rows = host(args.runs, args.contexts)?;
    if let Some(gpu) = gpu::Gpu::find(args.gpu)? {
        results.gpus(vec![gpu.name()?]);
        rows.extend(gpu.rows(args.runs, args.contexts)?);
    } else {
        println!("no GPU: only the host posts");
    }
    results.rows = rows;
    finish(&results, &args.output)
}

fn host(runs: u32, contexts: u64) -> Outcome<Vec<Row>> {
    let mut rows = Vec::new();
    let mut times = Quantiles::default();
    for _ in 0..runs {
        let ring = Ring::new(CONTEXTS_MAX)?;
        times.add(ring.beside_consumer(|_, _| None, |ring| round_trips(ring, ROUND_TRIPS))?.0);
    }
    rows.extend(times.rows("ring.host.round_trip_us"));
    let mut torn = 0;
    for size in SIZES {
        let mut rates = Vec::new();
        for _ in 0..runs {
            let ring = Ring::new(size)?;
            let requests = contexts / u64::from(size);
            let check = |request: &Request, at: usize| Some(posted_context(request.user, at as u16));
            let (cost, wrong) = ring.beside_consumer(check, |ring| post_all(ring, size, requests))?;
            torn += wrong;
            rates.push(rate(requests * u64::from(size), cost));
        }
        rows.push(Row::of_runs(format!("ring.host.contexts_per_s.{size}"), "M/s", &rates));
    }
    rows.push(Row::of_runs("ring.host.torn", "contexts", &[torn as f64]));
    Ok(rows)
}

/// Millions a second.
fn rate(count: u64, cost: Cost) -> f64 {
    count as f64 / cost.wall_s / 1e6
}

/// A context that says which request and which place it belongs to.
fn posted_context(user: u64, at: u16) -> Context {
    let mixed = (user << 8 | u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Context { extent: mixed as u32, layer: at, checksum: (mixed >> 32) as u32 }
}

/// A ring, and whether its consumer goes on.
struct Ring {
    memory: RingMemory,
    layout: Layout,
    is_over: AtomicBool,
}

impl Ring {
    fn new(contexts: u16) -> Outcome<Ring> {
        let layout = Layout::new(SLOTS, SLOTS, contexts)?;
        Ok(Ring { memory: RingMemory::create(layout, EPOCH)?, layout, is_over: AtomicBool::new(false) })
    }

    fn producer(&self) -> Producer {
        Producer::new(self.layout, &self.memory.header())
    }

    /// Works while a thread takes and ends requests; gives what came of the work, and how many
    /// contexts were other than they have to be, so far as `check` says what that is.
    fn beside_consumer<T>(
        &self,
        check: impl Fn(&Request, usize) -> Option<Context> + Sync,
        work: impl FnOnce(&Ring) -> Outcome<T>,
    ) -> Outcome<(T, u64)> {
        std::thread::scope(|scope| {
            let consumer = scope.spawn(|| self.consume(&check));
            let done = work(self);
            self.is_over.store(true, Ordering::Release);
            let wrong = consumer.join().unwrap_or_else(|_| Err("the consumer has panicked".into()))?;
            Ok((done?, wrong))
        })
    }

    fn consume(&self, check: &impl Fn(&Request, usize) -> Option<Context>) -> Outcome<u64> {
        let (words, mut wrong) = (self.memory.words(), 0);
        let mut consumer = Consumer::new(self.layout, &self.memory.header());
        let results = vec![ContextResult::default(); usize::from(self.layout.contexts())];
        loop {
            match consumer.take(words)? {
                Some(Taken::Work(work)) => {
                    let is_wrong = |(at, found): &(usize, &Context)| {
                        check(&work.request, *at).is_some_and(|context| context != **found)
                    };
                    wrong += work.contexts.iter().enumerate().filter(is_wrong).count() as u64;
                    consumer.end(words, work.ticket, &results[..work.contexts.len()], 0);
                }
                Some(Taken::Ended(Some(bad))) => return Err(bad.into()),
                Some(_) => {}
                None if self.is_over.load(Ordering::Acquire) => return Ok(wrong),
                // As a consumer of its own processor does.
                None => std::hint::spin_loop(),
            }
        }
    }
}

/// Microseconds of requests that ask for nothing, one after the other.
fn round_trips(ring: &Ring, count: usize) -> Outcome<Vec<f64>> {
    let (words, mut producer) = (ring.memory.words(), ring.producer());
    let mut us = Vec::with_capacity(count);
    for user in 0..count as u64 {
        let begun = Instant::now();
        let request = Request { user, lease: 0, op: Op::Nop, class: 0, contexts: 0, within_us: 0 };
        producer.post(words, &request, &[])?;
        while producer.reap(words)?.is_none() {
            if begun.elapsed() > LIMIT {
                return Err("a request does not end".into());
            }
            std::hint::spin_loop();
        }
        us.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(us)
}

/// What it costs to have so many requests taken and ended.
fn post_all(ring: &Ring, size: u16, requests: u64) -> Outcome<Cost> {
    let (words, mut producer) = (ring.memory.words(), ring.producer());
    cost(|| {
        let (mut posted, mut ended) = (0, 0);
        let mut contexts = Vec::with_capacity(size.into());
        while ended < requests {
            while producer.reap(words)?.is_some() {
                ended += 1;
            }
            if posted == requests {
                continue;
            }
            contexts.clear();
            contexts.extend((0..size).map(|at| posted_context(posted, at)));
            let request =
                Request { user: posted, lease: 0, op: Op::Read, class: 0, contexts: size, within_us: 0 };
            match producer.post(words, &request, &contexts) {
                Ok(_) => posted += 1,
                Err(NotPosted::Full { .. }) => std::hint::spin_loop(),
                Err(other) => return Err(other.into()),
            }
        }
        Ok(())
    })
}

/// Of each run the median and the 99th percentile.
#[derive(Default)]
struct Quantiles {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Quantiles {
    fn add(&mut self, mut times: Vec<f64>) {
        times.sort_by(f64::total_cmp);
        self.p50.push(times[times.len() / 2]);
        self.p99.push(times[times.len() * 99 / 100]);
    }

    fn rows(&self, name: &str) -> [Row; 2] {
        let row = |of: &str, runs: &[f64]| Row::of_runs(format!("{name}.{of}"), "us", runs);
        [row("p50", &self.p50), row("p99", &self.p99)]
    }
}
