//! The emulated host: engines, the memory tier and the SSD that they share, the links between them,
//! and the router in front. It starts and stops them.

use super::rows::{self, Count};
use super::spec::{CHUNK_TOKENS, Fault, HostSpec, SAMPLE_EVERY, engine_name, store_name};
use crate::cmd::engine::{Log, add_copy};
use forebay_emulator::{Engine, EngineHandle, StoreConnection};
use forebay_results::output::Error;
use forebay_router::{Backend, Policy, Router, RouterHandle};
use forebay_store::chunk_store::TenantStore;
use forebay_store::{Store, TenantId, TierConfig};
use forebay_trace::record::{Line, LinkSample, LoadSample, RecordWriter};
use forebay_transfer::Pages;
use forebay_transfer::{BitFlips, HostLink};
use forebay_transfer::{Limits, Link, LinkSpec, MoverHandle, MoverThread, PathSpec, Place};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where the memory tier lies.
const HOST: Place = Place::Host(0);

/// A running host.
pub struct Host {
    /// In front of the engines.
    pub router: RouterHandle,
    /// In the order of their numbers.
    engines: Vec<EngineHandle>,
    /// What they share.
    store: Store,
    /// What moves the bytes.
    mover: MoverHandle,
    /// Bits that the fault has flipped.
    flipped_bits: Arc<AtomicU64>,
    /// Chunks that were on the SSD at the start, if there is one.
    found_chunks: Option<u64>,
    _mover_thread: MoverThread,
}

impl HostSpec {
    /// Opens the memory tier, and the SSD below it, where there may be something from an earlier
    /// run of this policy.
    fn open_store(&self, mover: &MoverHandle, policy: Policy) -> Result<Store, Error> {
        let capacity_bytes = (self.memory_tokens * self.bytes_per_token()).next_multiple_of(1 << 20);
        let tier = TierConfig::new(capacity_bytes);
        let Some(ssd) = &self.ssd else { return Ok(Store::open(mover, HOST, Pages::Base, tier)?) };
        // What is loaded from the SSD goes from its staging to the memory tier too.
        add_copy(mover, "host-copy", HOST, HOST)?;
        // A log for each policy, so that each finds what it left there and nothing of the others.
        let named = |error| format!("{}: {error}", ssd.directory.display());
        std::fs::create_dir_all(&ssd.directory).map_err(named)?;
        let log = Log { path: ssd.directory.join(format!("{}.log", policy.name())), bytes: ssd.bytes };
        let chunk_bytes = CHUNK_TOKENS as u64 * self.bytes_per_token();
        let write_back = log.write_back(self.memory_tokens * self.bytes_per_token(), chunk_bytes);
        let ssd = log.open(mover, chunk_bytes)?;
        Ok(Store::open_with_ssd(mover, HOST, Pages::Base, tier, ssd, &write_back)?)
    }

    /// Starts everything, cold but for the SSD.
    pub async fn start(&self, policy: Policy, decision_log: &Path) -> Result<Host, Error> {
        let mover_thread = MoverThread::spawn(Limits::default())?;
        let mover = mover_thread.handle();
        let store = self.open_store(&mover, policy)?;
        let flipped_bits = Arc::new(AtomicU64::new(0));
        let mut engines = Vec::new();
        for number in 0..self.engines {
            let device = Place::Device(number);
            self.join_by_pcie(&mover, number, device, &flipped_bits)?;
            let shared = Arc::new(TenantStore::new(store.clone(), TenantId::default()));
            let connection = StoreConnection { store: shared, mover: mover.clone(), device };
            engines.push(Engine::spawn(self.engine_config(), Some(connection)).await?);
        }
        let backends = engines.iter().enumerate().map(|(number, engine)| Backend {
            store: store_name(),
            ..Backend::new(engine_name(number), format!("http://{}", engine.address()))
        });
        let router = Router::spawn(self.router_config(backends.collect(), policy, decision_log))?;
        let found_chunks = store.disk_stat().map(|stat| stat.ssd.tier.counters.chunks as u64);
        Ok(Host { router, engines, store, mover, flipped_bits, found_chunks, _mover_thread: mover_thread })
    }

    /// An engine's PCIe link, which carries both directions at once, so that each is a link to the
    /// mover.
    fn join_by_pcie(
        &self,
        mover: &MoverHandle,
        number: u16,
        device: Place,
        flipped: &Arc<AtomicU64>,
    ) -> Result<(), Error> {
        for (direction, from, to) in [("h2d", HOST, device), ("d2h", device, HOST)] {
            let inner = HostLink::new(1)?;
            let link: Box<dyn Link> = match self.fault {
                Some(Fault::FlipBit(chance)) => {
                    let seed = self.seed ^ (u64::from(number) << 1) ^ u64::from(direction == "d2h");
                    Box::new(BitFlips::new(inner, chance, seed, Arc::clone(flipped))?)
                }
                None => Box::new(inner),
            };
            let spec = LinkSpec::new(format!("pcie{number}-{direction}"), 2, 32 << 20);
            let link = mover.add_link(spec, link)?;
            mover.add_path(PathSpec::direct(from, to, link))??;
        }
        Ok(())
    }
}

impl Host {
    /// Samples load and links until it cannot write any more.
    pub async fn sample(&self, arm: &str, clock_ratio: f64, records: &RecordWriter) -> Error {
        let start = Instant::now();
        let mut ticks = tokio::time::interval(SAMPLE_EVERY);
        loop {
            ticks.tick().await;
            let at_s = start.elapsed().as_secs_f64() * clock_ratio;
            if let Err(error) = self.write_samples(arm, at_s, records) {
                return error;
            }
        }
    }

    fn write_samples(&self, arm: &str, at_s: f64, records: &RecordWriter) -> Result<(), Error> {
        for (number, engine) in self.engines.iter().enumerate() {
            let stats = engine.stats();
            records.write(&Line::Load(LoadSample {
                arm: arm.to_owned(),
                at_s,
                instance: engine_name(number),
                running: stats.running as u32,
                waiting: stats.waiting as u32,
                kv_usage: stats.blocks_used as f64 / stats.blocks_total.max(1) as f64,
            }))?;
        }
        for link in self.mover.telemetry()?.links {
            let (bytes, lots) = (link.bytes, link.lots);
            records.write(&Line::Link(LinkSample {
                arm: arm.to_owned(),
                at_s,
                link: link.name,
                bytes,
                lots,
            }))?;
        }
        Ok(())
    }

    /// What the parts counted themselves.
    pub fn counts(&self) -> Vec<Count> {
        let stats: Vec<_> = self.engines.iter().map(EngineHandle::stats).collect();
        let sum = |of: fn(&forebay_emulator::stats::Stats) -> u64| stats.iter().map(of).sum();
        let mut counts = vec![
            (rows::CHUNKS_LOADED, sum(|stats| stats.store.loaded_chunks)),
            (rows::CHUNKS_STORED, sum(|stats| stats.store.stored_chunks)),
            (rows::CORRUPTIONS_CAUGHT, sum(|stats| stats.store.corrupt_chunks)),
            ("bits flipped", self.flipped_bits.load(Ordering::Relaxed)),
            ("chunks evicted", self.store.stat().evicted),
            (rows::PREEMPTIONS, sum(|stats| stats.scheduler.preemptions)),
        ];
        if let (Some(found_chunks), Some(stat)) = (self.found_chunks, self.store.disk_stat()) {
            counts.extend([
                (rows::SSD_FOUND, found_chunks),
                (rows::SSD_CHUNKS, sum(|stats| stats.store.disk_chunks)),
                ("chunks written to SSD", stat.write_back.written),
                ("chunks promoted to memory", stat.promotions.promoted),
            ]);
        }
        counts
    }

    /// Stops everything and closes the SSD. When this returns nothing of the host runs any more.
    pub async fn stop(self) -> Result<(), Error> {
        self.router.shutdown().await;
        for engine in self.engines {
            engine.shutdown(Duration::ZERO).await;
        }
        Ok(tokio::task::spawn_blocking(move || self.store.close()).await??)
    }
}
