//! What all parts of one agent use. This file only holds it together.

use crate::call_handler::CallHandler;
use crate::endpoints::EndpointPool;
use crate::ipc::grants::Grants;
use crate::ipc::link::GrantNumbers;
use crate::ipc::opened::OpenRegion;
use crate::rails::Rails;
use crate::tcp::{FlowOptions, Identity, PeerRegions};
use crate::timer::Timer;
use forebay_transfer::lock::{Mutex, MutexGuard};
use forebay_transfer::{Ipc, MoverHandle, Process, RegionId};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// The parts of one agent.
pub(crate) struct Shared {
    pub name: String,
    pub me: Identity,
    pub flow_options: FlowOptions,
    pub flows_max: usize,
    pub mover: MoverHandle,
    pub timer: Timer,
    pub pool: EndpointPool,
    pub regions: PeerRegions,
    pub calls: Arc<CallHandler>,
    pub rails: Arc<Rails>,
    /// Has GPUs of this end copy to and from peers' by themselves.
    pub ipc: OnceLock<Arc<dyn Ipc>>,
    pub grants: Arc<Grants>,
    pub grant_numbers: GrantNumbers,
    /// Regions of peers that callers asked for themselves, and what they keep.
    pub caller_regions: Mutex<HashMap<RegionId, RegionGuard>>,
    pub process: Process,
}

/// What a region keeps that a caller asked for.
pub(crate) enum RegionGuard {
    /// The place of the peer in use.
    OverFlows { _uses: Arc<()> },
    /// Memory of the peer's GPU open.
    Open { _region: OpenRegion },
}

impl Shared {
    pub fn caller_regions(&self) -> MutexGuard<'_, HashMap<RegionId, RegionGuard>> {
        self.caller_regions.lock()
    }

    /// When a wait that begins now for a connection is over.
    pub fn connect_until_us(&self) -> u64 {
        self.timer.now_us().saturating_add(self.flow_options.connect_limit_us)
    }
}
