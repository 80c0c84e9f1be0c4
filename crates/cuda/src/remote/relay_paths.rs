//! The relays of a node as the engine's mover has them: links and paths, which stay for good, and
//! the staging behind them, which comes and goes with the connection.

use super::error::NotAttached;
use super::link::{Port, RemoteLink};
use super::nonce;
use super::session::Session;
use super::wire::{Offer, Uuid};
use crate::addresses::Addresses;
use crate::device::{ForeignMemory, Stream};
use crate::driver::{CudaError, abi::IpcHandle};
use crate::kernels::Kernels;
use crate::links::{Direction, PeerLink, SHARED, link_spec};
use crate::peers;
use crate::poller::Tracks;
use forebay_transfer::{LinkId, MoverHandle, PathSpec, Place, RegionId, Staging};
use std::sync::Arc;

/// Where the staging of the first relay is, for the mover: no GPU has such an ordinal.
const FIRST_RELAY: u16 = 0x8000;

/// What of a copier an attachment builds on.
#[derive(Debug, Clone)]
pub struct Ground {
    pub mover: MoverHandle,
    pub addresses: Arc<Addresses>,
    pub tracks: Tracks,
    /// GPUs that the copier has itself: it needs no other process to go over them.
    pub own: Vec<Uuid>,
}

/// The relays that a GPU has, or had.
pub struct RelayPaths {
    ground: Ground,
    kernels: Arc<Kernels>,
    relays: Vec<Relay>,
    /// Relays whose memory this GPU was seen to reach wrong: they are never used.
    untrusted: Vec<Uuid>,
}

/// A relay's links, for good, and its staging, while there is a connection.
struct Relay {
    gpu: Uuid,
    slot_bytes: u64,
    slots: u32,
    /// In the order of [`Direction::BOTH`].
    directions: [RelayDirection; 2],
    memory: Option<ForeignMemory>,
}

struct RelayDirection {
    staging: RegionId,
    port: Arc<Port>,
    /// The relay's PCIe link and the NVLink pair.
    links: [LinkId; 2],
}

impl RelayPaths {
    pub fn new(ground: Ground, kernels: &Arc<Kernels>) -> RelayPaths {
        RelayPaths { ground, kernels: Arc::clone(kernels), relays: vec![], untrusted: vec![] }
    }

    /// Puts all relays into service that this GPU reaches and the copier does not have itself. Says
    /// how many.
    pub fn install_all(&mut self, session: &Arc<Session>, offers: &[Offer]) -> Result<usize, NotAttached> {
        let mut installed = 0;
        let others = |offer: &Offer| !self.ground.own.contains(&offer.gpu);
        let offers: Vec<_> = offers.iter().enumerate().filter(|(_, offer)| others(offer)).collect();
        for (index, offer) in offers {
            let Some(memory) = self.open(offer)? else { continue };
            let relay = match self.relays.iter().position(|relay| relay.gpu == offer.gpu) {
                Some(known) => known,
                None => self.add_relay(offer)?,
            };
            installed += usize::from(self.install(relay, memory, session, index, offer)?);
        }
        let none = || NotAttached::NoRelays;
        (installed > 0).then_some(installed).ok_or_else(none)
    }

    /// Opens a relay's staging. `None` where this GPU does not reach it.
    fn open(&mut self, offer: &Offer) -> Result<Option<ForeignMemory>, NotAttached> {
        if self.untrusted.contains(&offer.gpu) {
            return Ok(None);
        }
        let Ok(memory) = ForeignMemory::open(self.kernels.device(), IpcHandle(offer.handle.0)) else {
            return Ok(None);
        };
        let read = nonce::read(self.kernels.device(), memory.address())?;
        if read != offer.nonce.0 || offer.staging_bytes().is_none_or(|bytes| bytes < peers::OPENED_BYTES) {
            return Ok(None);
        }
        if let Err(why) = peers::check_opened(&self.kernels, memory.address()) {
            let (gpu, relay, advice) = (self.kernels.device().index(), offer.gpu, peers::ADVICE);
            tracing::warn!(gpu, %relay, advice, reason = %why, "relay of the node is not used");
            self.untrusted.push(offer.gpu);
            return Ok(None);
        }
        Ok(Some(memory))
    }

    /// Puts a relay into service. Staging of other sizes than its paths have is not used.
    fn install(
        &mut self,
        relay: usize,
        memory: ForeignMemory,
        session: &Arc<Session>,
        index: usize,
        offer: &Offer,
    ) -> Result<bool, NotAttached> {
        let ground = &self.ground;
        let relay = &mut self.relays[relay];
        if (relay.slot_bytes, relay.slots) != (offer.slot_bytes, offer.slots) || relay.memory.is_some() {
            return Ok(false);
        }
        let staging_bytes = relay.slot_bytes * u64::from(relay.slots);
        for (nth, direction) in relay.directions.iter().enumerate() {
            let address = memory.address() + nth as u64 * staging_bytes;
            ground.addresses.insert(direction.staging, address, staging_bytes);
            direction.port.connect(session, 2 * index + nth);
        }
        relay.memory = Some(memory);
        for link in relay.directions.iter().flat_map(|direction| direction.links) {
            ground.mover.set_link_up(link, true)?;
        }
        Ok(true)
    }

    /// Gives the mover links and paths of a relay that was never seen before, out of service.
    fn add_relay(&mut self, offer: &Offer) -> Result<usize, NotAttached> {
        let index = self.relays.len();
        let [there, back] = Direction::BOTH;
        // What the driver may refuse comes first, since links and paths are for good.
        let (to_gpu, from_gpu) = (self.pair()?, self.pair()?);
        let directions = [
            self.add_direction(index, offer, there, to_gpu)?,
            self.add_direction(index, offer, back, from_gpu)?,
        ];
        let Offer { gpu, slot_bytes, slots, .. } = *offer;
        self.relays.push(Relay { gpu, slot_bytes, slots, directions, memory: None });
        Ok(index)
    }

    /// The NVLink pair between this GPU and staging. Its kernels are short, and what an engine
    /// loads waits for them while others of the engine's have the GPU.
    fn pair(&self) -> Result<PeerLink, CudaError> {
        let Ground { addresses, tracks, .. } = &self.ground;
        let [engine, kernel] = [Stream::new(self.kernels.device())?, Stream::urgent(self.kernels.device())?];
        let (engine, kernel) = (tracks.track(engine), tracks.track(kernel));
        PeerLink::new(Some(engine), kernel, &self.kernels, addresses)
    }

    fn add_direction(
        &self,
        index: usize,
        offer: &Offer,
        direction: Direction,
        pair: PeerLink,
    ) -> Result<RelayDirection, NotAttached> {
        let ground = &self.ground;
        let (handle, tracks) = (&ground.mover, &ground.tracks);
        let place = Place::Device(FIRST_RELAY + index as u16);
        let Offer { slot_bytes, slots, .. } = *offer;
        let staging = handle.register_opaque(place, slot_bytes * u64::from(slots))?;
        let port = Arc::<Port>::default();
        let remote = RemoteLink::new(direction, &port, tracks.watch_track());
        let (short, gpu) = (String::from(offer.gpu).split_off(24), self.kernels.device().index());
        let name = direction.name();
        let remote = handle.add_link(link_spec(format!("relay-{short}.{name}")), Box::new(remote))?;
        let pair = handle.add_link(link_spec(format!("relay-{short}.gpu{gpu}.{name}")), Box::new(pair))?;
        let links = [remote, pair];
        for link in links {
            handle.set_link_up(link, false)?;
        }
        let hops = direction.in_order(remote, pair).into();
        let (from, to) = direction.ends(SHARED, gpu);
        let slots = Staging { region: staging, slot_bytes, slots };
        handle.add_path(PathSpec::relayed(from, to, hops, slots, false))??;
        Ok(RelayDirection { staging, port, links })
    }

    /// Takes all relays out of service. What is unfinished goes over other paths.
    pub fn take_down(&self) {
        for link in self.links() {
            // A mover that has ended starts nothing more.
            let _ = self.ground.mover.set_link_up(link, false);
        }
        self.directions().for_each(|direction| direction.port.disconnect());
    }

    /// Whether nothing is in flight on any of their links.
    pub fn is_idle(&self) -> bool {
        let telemetry = self.ground.mover.telemetry();
        let idle =
            |link: LinkId| telemetry.as_ref().map_or(true, |all| all.links[link.index()].in_flight_lots == 0);
        self.links().all(idle)
    }

    /// Lets go of all staging. Nothing uses it any more.
    pub fn close_staging(&mut self) {
        self.directions().for_each(|direction| self.ground.addresses.remove(direction.staging));
        self.relays.iter_mut().for_each(|relay| relay.memory = None);
    }

    /// Leaves all staging open for good, for what may still use it.
    pub fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.relays));
    }

    fn directions(&self) -> impl Iterator<Item = &RelayDirection> {
        self.relays.iter().flat_map(|relay| &relay.directions)
    }

    fn links(&self) -> impl Iterator<Item = LinkId> {
        self.directions().flat_map(|direction| direction.links)
    }
}
