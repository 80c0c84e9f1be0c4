//! Hand-over straight from one engine's pages to another's, past the nodes. The prefiller *offers*
//! the pages of a prompt under a key; the decoder, who has the key from the ticket, opens the
//! offer, gets a lease, copies the pages that it lacks, and gives the lease back. Only if it lived
//! until then were the bytes those of the prompt; else the load has brought nothing.
//!
//! - [`offers`] is the prefiller's side, [`read`] the decoder's, [`message`] what they say.
//! - [`memory`] is the contract of who copies: [`host`] by the mover under the lease, [`gpu`] by
//!   the decoder's kernels from memory that the prefiller exports.
//!
//! Here and there the shape must be the same: [`plan`] says which bytes go where.

mod gpu;
mod host;
mod memory;
mod message;
mod offers;
mod plan;
mod read;

pub use gpu::GpuMemory;
pub use host::HostMemory;
pub use memory::DirectMemory;
pub use message::{Digest, Key};
pub use offers::{OfferEnd, OfferEnded};
pub use read::{ReadRequest, ReadSource};

use crate::errors::NotBegun;
use crate::errors::NotCopied;
use crate::page_tables::PageTables;
use crate::shared::Shared;
use forebay_net::{Agent, AgentConfig, AgentError};
use forebay_transfer::Place;
use forebay_transfer::lock::Mutex;
use offers::Offers;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How often it is looked whether peers are still there whose memory is mapped.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How an engine hands over directly.
#[derive(Debug, Clone)]
pub struct DirectOptions {
    /// What other engines call this one's cache, each by another name.
    pub name: String,
    /// Asked of other engines, and shown to them.
    pub token: Vec<u8>,
}

/// Why an engine hands nothing over directly.
#[derive(Debug, Error)]
pub enum NoDirect {
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Memory(#[from] NotCopied),
}

/// Both sides of one cache.
pub struct Direct {
    shared: Arc<Shared>,
    agent: Mutex<Option<Arc<Agent>>>,
    offers: Arc<Offers>,
    memory: Arc<dyn DirectMemory>,
    watches_peers: AtomicBool,
}

impl Direct {
    /// Listens to engines of this host.
    pub fn start(
        shared: &Arc<Shared>,
        options: &DirectOptions,
        here: Place,
        memory: impl FnOnce(&Shared, &Arc<Agent>) -> Result<Arc<dyn DirectMemory>, NotCopied>,
    ) -> Result<Arc<Direct>, NoDirect> {
        let offers = Arc::new(Offers::new(&shared.tasks));
        let config = AgentConfig {
            token: options.token.clone(),
            service: Some(Arc::clone(&offers) as _),
            flows_max: 1,
            ..AgentConfig::named(options.name.clone())
        };
        let agent = Arc::new(Agent::start_on(config, shared.mover.clone(), here)?);
        let memory = memory(shared, &agent)?;
        offers.open(agent.leases().clone(), Arc::clone(&memory));
        let agent = Mutex::new(Some(agent));
        let (shared, watches_peers) = (Arc::clone(shared), AtomicBool::new(false));
        Ok(Arc::new(Direct { shared, agent, offers, memory, watches_peers }))
    }

    /// What other engines need to find this one.
    pub fn metadata(&self) -> Vec<u8> {
        self.agent().map(|agent| agent.metadata()).unwrap_or_default()
    }

    fn agent(&self) -> Option<Arc<Agent>> {
        self.agent.lock().clone()
    }

    /// Offers the pages of a sequence. They must stay as they are until
    /// [`take_ended`](Direct::take_ended) names the key, after `ttl` at the latest if nobody opens
    /// the offer.
    pub fn offer(&self, key: Key, digest: Digest, tables: &PageTables, ttl: Duration) {
        self.offers.offer(key, digest, tables, ttl);
    }

    /// Offers that have ended since this was asked last: nobody reads their pages, or whoever does
    /// will learn that what it got is void.
    pub fn take_ended(&self) -> Vec<OfferEnded> {
        self.offers.take_ended()
    }

    /// Ends all offers, and waits until nobody reads pages any more or may do so.
    pub fn withdraw(&self) {
        self.offers.withdraw();
    }

    /// Tells whoever offers something that nobody will read it.
    pub fn decline(&self, metadata: &[u8], key: Key) {
        let Some(agent) = self.agent() else { return };
        let Ok(peer) = peer_of(&agent, metadata) else { return };
        let question = message::Question::Decline { key };
        // An offer that nobody declines ends by itself.
        let _ = agent.call(&peer, question.encode(), read::ANSWER_LIMIT_US, |_| {});
    }

    /// Copies offered pages into pages here, behind what is in the engine's `stream` now.
    pub fn read(self: &Arc<Self>, request: ReadRequest, stream: u64) -> Result<(), NotBegun> {
        read::begin(self, request, stream)
    }

    /// Lets go of the memory of peers soon after they are gone, as long as any is mapped.
    fn watch_peers(self: &Arc<Self>) {
        if self.watches_peers.swap(true, Ordering::AcqRel) {
            return;
        }
        let direct = Arc::downgrade(self);
        self.shared.tasks.post_at(Instant::now() + LOOK_AGAIN, move || {
            let Some(direct) = direct.upgrade() else { return };
            direct.watches_peers.store(false, Ordering::Release);
            let peers = direct.agent().map(|agent| agent.stats()).unwrap_or_default();
            let is_up = |name: &str| peers.iter().any(|peer| peer.name == name && peer.state == "up");
            if direct.memory.forget_peers(&|name| !is_up(name)) {
                direct.watch_peers();
            }
        });
    }

    /// Ends all offers, and waits until nobody reads pages any more or may do so. Reads of this
    /// side have ended.
    pub fn close(&self) {
        self.offers.close();
        let agent = self.agent.lock().take();
        drop(agent);
        self.memory.close();
    }
}

/// The peer that metadata speak of. They come with requests, so nobody is sent to another host.
fn peer_of(agent: &Agent, metadata: &[u8]) -> Result<String, String> {
    let address = forebay_net::address_in(metadata).map_err(|bad| bad.to_string())?;
    match address {
        Some(address) if address.ip().is_loopback() => {
            agent.add_peer(metadata).map_err(|error| error.to_string())
        }
        address => Err(format!("the peer listens at {address:?}; allowed is a loopback address")),
    }
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Direct").field("offers", &self.offers).finish_non_exhaustive()
    }
}
