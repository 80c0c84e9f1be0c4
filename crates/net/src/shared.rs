//! What all parts of one agent use. This file only holds it together.

use crate::call_handler::CallHandler;
use crate::endpoints::EndpointPool;
use crate::rails::Rails;
use crate::tcp::{FlowOptions, Identity, PeerRegions};
use crate::timer::Timer;
use forebay_transfer::lock::{Mutex, MutexGuard};
use forebay_transfer::{MoverHandle, Process, RegionId};
use std::collections::HashMap;
use std::sync::Arc;

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
    /// Regions of peers that callers asked for themselves, and the places that they keep in use.
    pub lent: Mutex<HashMap<RegionId, Arc<()>>>,
    pub process: Process,
}

impl Shared {
    pub fn lent(&self) -> MutexGuard<'_, HashMap<RegionId, Arc<()>>> {
        self.lent.lock()
    }

    /// When a wait that begins now for a connection is over.
    pub fn connect_until_us(&self) -> u64 {
        self.timer.now_us().saturating_add(self.flow_options.connect_limit_us)
    }
}
