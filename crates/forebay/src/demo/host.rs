//! The emulated host: engines, the memory tier and the SSD that they share, the links between them, and the router in front. It
//! starts and stops them; it must never know what is asked of them.

use super::fault::Fault;
use super::ssd::SsdShape;
use forebay_engine::kv_store::InProcess;
use forebay_engine::profile::Profile;
use forebay_engine::truth::Oracle;
use forebay_engine::{Engine, EngineConfig, EngineHandle, StoreConnection};
use forebay_links::{BitFlips, HostLink};
use forebay_mover::{Limits, Link, LinkSpec, MoverHandle, MoverThread, Place, RouteSpec};
use forebay_router::{Backend, Policy, Router, RouterConfig, RouterHandle};
use forebay_store::{Pages, Store, TenantId, TierConfig};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// KV bytes that are really kept for a token in a layer. Small, so that many engines fit a small machine.
const KV_BYTES_PER_TOKEN_LAYER: usize = 4;
/// Tokens of a chunk in the memory tier.
pub const CHUNK_TOKENS: usize = 256;
/// Tokens per streamed chunk after the first, as with vLLM's `--stream-interval`: model time runs faster than real time,
/// and so would the stream's events.
const STREAM_INTERVAL: usize = 16;
/// Where the memory tier lies.
const HOST: Place = Place::Host(0);
/// Prefixes that the oracle remembers; more than the demo's traces have.
const ORACLE_BLOCKS: usize = 1 << 20;

/// What the host is to be.
pub struct HostShape {
    /// GPU and model that each engine emulates.
    pub profile: Profile,
    /// How many engines.
    pub engines: u16,
    /// KV pool of each.
    pub pool_tokens: usize,
    /// Memory tier, in tokens.
    pub memory_tokens: u64,
    /// What lies below it, if anything.
    pub ssd: Option<SsdShape>,
    /// Model seconds per real second.
    pub clock_ratio: f64,
    /// What the links do to the bytes.
    pub fault: Option<Fault>,
    /// Seed of faults.
    pub seed: u64,
}

/// A running host.
pub struct Host {
    /// In the order of their numbers.
    pub engines: Vec<EngineHandle>,
    /// In front of them.
    pub router: RouterHandle,
    /// What they share.
    pub store: Store,
    /// What moves the bytes.
    pub mover: MoverHandle,
    /// Bits that the fault has flipped.
    pub flipped_bits: Arc<AtomicU64>,
    _mover_thread: MoverThread,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

impl HostShape {
    /// One line for people.
    pub fn description(&self) -> String {
        let fault = match self.fault {
            Some(Fault::FlipBit(chance)) => format!(", a flipped bit per {:.0} bytes moved", 1.0 / chance),
            None => String::new(),
        };
        let ssd = match &self.ssd {
            Some(ssd) => format!(", an SSD log in {} below it", ssd.directory.display()),
            None => String::new(),
        };
        format!(
            "Host: {} engines of profile {}, KV pool {} tokens each, {} tokens of shared host memory{ssd}, clock x{}{fault}",
            self.engines, self.profile.name, self.pool_tokens, self.memory_tokens, self.clock_ratio
        )
    }

    /// What an engine must answer.
    pub fn oracle(&self) -> Result<Oracle, Error> {
        Ok(Oracle::new(self.engine_config().truth()?, self.profile.model.vocab, ORACLE_BLOCKS))
    }

    fn engine_config(&self) -> EngineConfig {
        let mut profile = self.profile.clone();
        profile.memory.pool_tokens = self.pool_tokens;
        let namespace = profile.namespace();
        EngineConfig {
            kv_bytes_per_token_layer: KV_BYTES_PER_TOKEN_LAYER,
            chunk_tokens: CHUNK_TOKENS,
            clock_ratio: self.clock_ratio,
            stream_interval: STREAM_INTERVAL,
            ..EngineConfig::new(profile, namespace.key())
        }
    }

    /// KV bytes that are really kept for a token.
    pub fn bytes_per_token(&self) -> u64 {
        (self.profile.model.layers * KV_BYTES_PER_TOKEN_LAYER) as u64
    }

    /// Opens the memory tier, and the SSD below it, where there may be something from an earlier run of this policy.
    fn open_store(&self, mover: &MoverHandle, policy: Policy) -> Result<Store, Error> {
        let capacity_bytes = (self.memory_tokens * self.bytes_per_token()).next_multiple_of(1 << 20);
        let tier = TierConfig::new(capacity_bytes);
        let Some(ssd) = &self.ssd else { return Ok(Store::open(mover, HOST, Pages::Base, tier)?) };
        // What is loaded from the SSD goes from its staging to the memory tier too.
        let link = LinkSpec::new("host-copy", 2, 32 << 20);
        let link = mover.add_link(link, Box::new(HostLink::new(1)?))?;
        mover.add_route(RouteSpec::direct(HOST, HOST, link))??;
        let log = ssd.open(policy.name(), mover, HOST)?;
        Ok(Store::open_with_ssd(mover, HOST, Pages::Base, tier, log, &ssd.write_back(self))?)
    }

    /// Starts everything, cold but for the SSD.
    pub async fn start(&self, policy: Policy) -> Result<Host, Error> {
        let mover_thread = MoverThread::spawn(Limits::default())?;
        let mover = mover_thread.handle();
        let store = self.open_store(&mover, policy)?;
        let flipped_bits = Arc::new(AtomicU64::new(0));
        let mut engines = Vec::new();
        for number in 0..self.engines {
            let device = Place::Device(number);
            self.join_by_pcie(&mover, number, device, &flipped_bits)?;
            let shared = Arc::new(InProcess::new(store.clone(), TenantId::default()));
            let connection = StoreConnection { store: shared, mover: mover.clone(), device };
            engines.push(Engine::spawn(self.engine_config(), Some(connection)).await?);
        }
        let backends = engines.iter().enumerate().map(|(number, engine)| Backend {
            name: format!("engine-{number}"),
            url: format!("http://{}", engine.address()),
        });
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let router = Router::spawn(RouterConfig::new(listen, backends.collect(), policy))?;
        Ok(Host { engines, router, store, mover, flipped_bits, _mover_thread: mover_thread })
    }

    /// An engine's PCIe link, which carries both directions at once, so that each is a link to the mover.
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
            mover.add_route(RouteSpec::direct(from, to, link))??;
        }
        Ok(())
    }
}

impl Host {
    /// Stops everything and closes the SSD. When this returns nothing of the host runs any more.
    pub async fn stop(self) -> Result<(), Error> {
        self.router.shutdown().await;
        for engine in self.engines {
            engine.shutdown(Duration::ZERO).await;
        }
        Ok(tokio::task::spawn_blocking(move || self.store.close()).await??)
    }
}
