//! The asking end: which transfers can go from GPU to GPU, and how a peer's memory is opened for
//! them, on a thread that waits for the peer and the driver. What cannot be opened goes over TCP,
//! with the reason counted and logged.

use super::link::{Bound, OnFlow};
use super::messages::{Answer, Question};
use super::opened::{IpcRegions, OnOpen, OpenRegion, OpenRequest, OpenStep};
use crate::call_handler;
use crate::connect;
use crate::host_process::HostProcess;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::tcp::PeerRegion;
use forebay_transfer::{Ipc, Place, RegionId};
use std::sync::{Arc, Weak, mpsc};

/// What was open for so long without use is closed: while it is open it stays allocated, also when
/// its owner has freed it.
const REST_US: u64 = 10_000_000;

/// How a region is not opened.
enum NotOpened {
    /// It is host memory.
    Host,
    /// It will not be over this connection.
    Not(String),
    /// It may be at another time.
    Now(String),
}

/// The GPU of this end that a transfer's regions lie on, and those of the peer. `None`: it is not
/// one between a GPU here and memory of the peer.
pub(crate) fn between(
    shared: &Shared,
    regions: impl IntoIterator<Item = RegionId>,
) -> Option<(Place, Vec<(RegionId, PeerRegion)>)> {
    shared.ipc.get()?;
    let (mut place, mut theirs) = (None, Vec::new());
    for id in regions {
        if let Some((region, _)) = shared.regions.known(id) {
            theirs.push((id, region));
            continue;
        }
        let lies_on = shared.pool.devices.place_of(id)?;
        if *place.get_or_insert(lies_on) != lies_on {
            return None;
        }
    }
    place.map(|place| (place, theirs))
}

/// Calls `then` with the peer's regions as they are open over IPC, at once if it is known; with
/// nothing where the transfer has to go over TCP.
pub(crate) fn when_open(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    (place, regions): (Place, Vec<(RegionId, PeerRegion)>),
    then: impl FnOnce(Option<IpcRegions>) + Send + 'static,
) {
    let then: OnOpen = Box::new(then);
    match peer.opened.want(OpenRequest { place, regions, then }) {
        OpenStep::Go(then, found) => then(found),
        OpenStep::Wait => {}
        OpenStep::Open => {
            let (weak, its) = (Arc::downgrade(shared), Arc::clone(peer));
            let opener = std::thread::Builder::new().name("forebay-open".into());
            if opener.spawn(move || open_all(&weak, &its)).is_err() {
                while let Some(request) = peer.opened.next_waiting() {
                    (request.then)(None);
                }
            }
        }
    }
}

/// A transfer has ended that used what was open.
pub(crate) fn ended(shared: &Arc<Shared>, peer: &Arc<Peer>, used: &IpcRegions, failed: Option<&str>) {
    if let Some(why) = failed {
        not_used(peer, why);
    }
    if peer.opened.ended(used, failed.is_some()) {
        rest_later(shared, peer);
    }
}

/// Closes what nobody uses for a while.
fn rest_later(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let (weak, its, uses) = (Arc::downgrade(shared), Arc::downgrade(peer), peer.opened.uses());
    shared.timer.at(shared.timer.now_us() + REST_US, move || {
        let (Some(shared), Some(peer)) = (weak.upgrade(), its.upgrade()) else { return };
        if peer.opened.rest(uses) {
            rest_later(&shared, &peer);
        }
    });
}

fn not_used(peer: &Peer, why: &str) {
    peer.metrics.fault("ipc_not_used");
    peer.log.ipc_not_used(why);
}

/// Opens what is waited for, until nobody waits.
fn open_all(weak: &Weak<Shared>, peer: &Arc<Peer>) {
    while let Some(request) = peer.opened.next_waiting() {
        let found = match weak.upgrade() {
            Some(shared) => {
                open_requested(&shared, peer, &request);
                peer.opened.ipc_regions(&request)
            }
            None => None,
        };
        (request.then)(found);
    }
}

fn open_requested(shared: &Arc<Shared>, peer: &Arc<Peer>, request: &OpenRequest) {
    let (regions, connection) = peer.opened.unknown(request);
    for region in regions {
        let name = (region, request.place);
        let found = match open(shared, peer, request.place, region, 0) {
            Ok(open) => Some(Arc::new(open)),
            Err(NotOpened::Host) => None,
            Err(NotOpened::Not(why)) => {
                not_used(peer, &why);
                None
            }
            Err(NotOpened::Now(why)) => return not_used(peer, &why),
        };
        let opened = found.is_some();
        peer.opened.keep(name, found, connection);
        if !opened {
            return;
        }
    }
}

/// Opens a region of a peer for a GPU of this end, for operations under this lease. Waits for the
/// peer. `None`: it cannot be; it may be read and written over TCP all the same.
pub(crate) fn open_one(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    place: Place,
    region: PeerRegion,
    lease: u64,
) -> Option<OpenRegion> {
    match open(shared, peer, place, region, lease) {
        Ok(open) => Some(open),
        Err(NotOpened::Host) => None,
        Err(NotOpened::Not(why) | NotOpened::Now(why)) => {
            not_used(peer, &why);
            None
        }
    }
}

fn open(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    place: Place,
    region: PeerRegion,
    lease: u64,
) -> Result<OpenRegion, NotOpened> {
    let not = |why: &dyn ToString| NotOpened::Not(why.to_string());
    let ipc = shared.ipc.get().ok_or(NotOpened::Host)?;
    let host = shared.rails.host.ok_or_else(|| not(&"this host has no boot id"))?;
    let process = HostProcess::own().map_err(|why| not(&why))?;
    let PeerRegion { key, generation, .. } = region;
    let exported = match ask(shared, peer, &Question::Open { host, process, key, generation })? {
        Answer::Yes(exported) => exported,
        Answer::HostMemory => return Err(NotOpened::Host),
        Answer::NotExported(why) => return Err(NotOpened::Not(why)),
        Answer::Fault(fault) => return Err(NotOpened::Now(fault.to_string())),
    };
    let mut site = peer.site();
    let endpoint = site.endpoint(&shared.pool);
    let there = endpoint.ipc_place(&shared.pool, bound(shared, peer, ipc, place));
    let (there, uses) = (there.map_err(|why| not(&why))?, Arc::clone(&endpoint.uses));
    drop(site);
    let id = shared.regions.register(&shared.mover, there, region, lease).map_err(|why| not(&why))?;
    let memory = ipc.open(place, &exported, id).map_err(|why| {
        // Nobody has named it yet.
        let _ = shared.regions.unregister(&shared.mover, id);
        NotOpened::Not(why)
    })?;
    let ways = (shared.mover.clone(), shared.regions.clone(), shared.timer.clone());
    Ok(OpenRegion::new(id, ways, memory, uses))
}

/// Asks the peer, and waits for its answer.
fn ask(shared: &Shared, peer: &Peer, question: &Question) -> Result<Answer, NotOpened> {
    let now = |why: &str| NotOpened::Now(why.to_owned());
    let flow = peer.flow().ok_or_else(|| now("there is no connection"))?;
    let mut body = vec![call_handler::GPUS];
    question.put(&mut body);
    let (sender, receiver) = mpsc::sync_channel(1);
    flow.call(body, shared.flow_options.connect_limit_us, move |answer| drop(sender.send(answer)));
    let reply = receiver.recv().map_err(|_| now("the connection has ended"))?;
    let reply = reply.map_err(|why| match why {
        // It is of an earlier version.
        crate::tcp::CallError::Refused(_) => NotOpened::Not(why.to_string()),
        why => NotOpened::Now(why.to_string()),
    })?;
    Answer::parse(&reply).ok_or_else(|| NotOpened::Not("the peer's answer means nothing here".into()))
}

/// What a link of the mover to a peer's GPUs needs.
fn bound(shared: &Arc<Shared>, peer: &Arc<Peer>, ipc: &Arc<dyn Ipc>, place: Place) -> Bound {
    let (weak, its) = (Arc::downgrade(shared), Arc::downgrade(peer));
    let reach = move |then: OnFlow| {
        let (Some(shared), Some(peer)) = (weak.upgrade(), its.upgrade()) else { return then(None) };
        let found = Arc::clone(&peer);
        let until_us = shared.connect_until_us();
        connect::when_up(&shared, &peer, until_us, move |up| then(found.flow().filter(|_| up.is_ok())));
    };
    let its = Arc::downgrade(peer);
    Bound {
        ipc: Arc::clone(ipc),
        place,
        regions: shared.regions.clone(),
        numbers: Arc::clone(&shared.grant_numbers),
        metrics: Arc::clone(&peer.metrics),
        timer: shared.timer.clone(),
        answer_limit_us: shared.flow_options.connect_limit_us,
        flow: Box::new(move || its.upgrade().and_then(|peer| peer.flow())),
        reach: Box::new(reach),
        channel: call_handler::GPUS,
    }
}
