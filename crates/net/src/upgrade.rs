//! Takes a peer that was reached over TCP to the best rails that both ends have: shared memory on one host, else RDMA. What
//! goes wrong with a rail leaves the bytes on TCP, with the reason kept and counted. This file says which rails are tried
//! and when; it must never know how bytes move on one.

use crate::connect::{self, Arrival};
use crate::desk;
use crate::menu::{Menu, WhyIdle, Word};
use crate::path::Way;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::tcp::{Broken, FlowHandle, FlowOptions};
use crate::ucx::{Fabric, UcxFlow};
use std::sync::{Arc, Weak, mpsc};

/// After the last rail was lost, rails are tried again in so long; twice as long after each further time.
const REST_US: u64 = 1_000_000;
/// Doublings at most: the longest rest is about a minute.
const REST_DOUBLINGS: u32 = 6;

/// Tries the rails that both ends have, on a thread of its own. Without rails here nothing is begun.
pub(crate) fn begin(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    if shared.rails.is_empty() {
        return;
    }
    let Some(boarding) = Boarding::new(shared, peer) else { return };
    let its = Arc::clone(peer);
    on_thread(move || boarding.run(), move || its.gauge.fault("rail_failed"));
}

/// Brings one more flow about over a rail that carries some. `then` hears whether it came.
pub(crate) fn one_more(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    rail: usize,
    then: impl FnOnce(bool) + Send + Clone + 'static,
) {
    let Some(boarding) = Boarding::new(shared, peer) else { return then(false) };
    let otherwise = then.clone();
    on_thread(move || then(boarding.board(rail).is_ok()), move || otherwise(false));
}

fn on_thread(work: impl FnOnce() + Send + 'static, otherwise: impl FnOnce()) {
    let thread = std::thread::Builder::new().name("forebay-rail".into()).spawn(work);
    if thread.is_err() {
        otherwise();
    }
}

/// Flows over rails have ended, the others of those rails live on.
pub(crate) fn lost(shared: &Arc<Shared>, peer: &Arc<Peer>, rails: &[usize], why: &Broken) {
    let mut state = peer.state();
    for nth in rails {
        if !state.flows.iter().any(|flow| flow.way.rail() == Some(*nth)) {
            state.idle_rails.insert(*nth, WhyIdle::Lost(why.clone()));
            peer.gauge.fault("rail_lost");
        }
    }
    let back_on_tcp = !rails.is_empty() && !state.flows.is_empty() && !state.is_railed();
    drop(state);
    if back_on_tcp {
        again_later(shared, peer);
    }
}

/// Tries rails again after a rest, if the connection is there still.
fn again_later(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let mut state = peer.state();
    let rest_us = REST_US << state.rail_rests.min(REST_DOUBLINGS);
    state.rail_rests += 1;
    drop(state);
    let (weak, its) = (Arc::downgrade(shared), Arc::downgrade(peer));
    shared.keeper.at(shared.keeper.now_us() + rest_us, move || {
        let (Some(shared), Some(peer)) = (weak.upgrade(), its.upgrade()) else { return };
        let state = peer.state();
        let wanted = !state.flows.is_empty() && !state.is_railed();
        drop(state);
        if wanted {
            begin(&shared, &peer);
        }
    });
}

/// One peer on its way to rails. The agent may end meanwhile.
struct Boarding {
    shared: Weak<Shared>,
    peer: Arc<Peer>,
    /// The flow on which it is spoken of rails. Rails that come about after its end are not wanted.
    control: u64,
    handle: FlowHandle,
    instance: [u8; 16],
    options: FlowOptions,
}

impl Boarding {
    fn new(shared: &Arc<Shared>, peer: &Arc<Peer>) -> Option<Boarding> {
        // Under the lock of the site, so that the flow is to whom answered.
        let site = peer.site();
        let instance = site.answered?;
        let (control, handle) = peer.state().flows.first().map(|flow| (flow.number, flow.handle.clone()))?;
        drop(site);
        let options = FlowOptions { instance: Some(instance), ..shared.flow_options.clone() };
        let (weak, peer) = (Arc::downgrade(shared), Arc::clone(peer));
        Some(Boarding { shared: weak, peer, control, handle, instance, options })
    }

    fn run(&self) {
        let Some(rails) = self.shared.upgrade().map(|shared| Arc::clone(&shared.rails)) else { return };
        let own = rails.wanted();
        let mut idle = match self.ask() {
            Ok(theirs) => own.compare(&theirs),
            Err(why) => vec![Some(WhyIdle::Unasked(why)); own.fabrics.len()],
        };
        // The best fabric on which a flow comes about; all rails of it.
        let mut carries = None;
        for fabric in Fabric::ALL {
            for (nth, why) in idle.iter_mut().enumerate() {
                if own.fabrics[nth] != fabric || why.is_some() {
                    continue;
                }
                match carries.filter(|better| *better != fabric) {
                    Some(better) => *why = Some(WhyIdle::NotNeeded(better)),
                    None => *why = self.board(nth).err(),
                }
                if why.is_none() {
                    carries = Some(fabric);
                }
            }
        }
        self.note(idle, carries.is_some());
    }

    /// Keeps and counts why rails carry nothing.
    fn note(&self, idle: Vec<Option<WhyIdle>>, carries: bool) {
        let mut state = self.peer.state();
        if !state.flows.iter().any(|flow| flow.number == self.control) {
            return;
        }
        for (nth, why) in idle.into_iter().enumerate() {
            let Some(why) = why else { continue };
            if let Some(fault) = why.fault() {
                self.peer.gauge.fault(fault);
            }
            state.idle_rails.insert(nth, why);
        }
        // What never came about will not; what did and was lost may come back.
        let had_some = state.rail_rests > 0;
        drop(state);
        if let (false, true, Some(shared)) = (carries, had_some, self.shared.upgrade()) {
            again_later(&shared, &self.peer);
        }
    }

    /// Which rails the peer has.
    fn ask(&self) -> Result<Menu, String> {
        let answer = self.call(&Word::Question)?;
        Menu::parse(&answer).ok_or_else(|| "its answer means nothing here".into())
    }

    /// Says something to the peer and waits for its answer.
    fn call(&self, word: &Word<'_>) -> Result<Vec<u8>, String> {
        let mut body = vec![desk::RAILS];
        word.put(&mut body);
        let (sender, receiver) = mpsc::sync_channel(1);
        self.handle.call(body, self.options.connect_limit_us, move |answer| drop(sender.send(answer)));
        match receiver.recv() {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(Broken::Ended.to_string()),
        }
    }

    /// Brings a flow about over a rail, and gives it a seat.
    fn board(&self, nth: usize) -> Result<(), WhyIdle> {
        let ended = || WhyIdle::Lost(Broken::Ended);
        let (rails, me, regions) = match self.shared.upgrade() {
            Some(shared) => (Arc::clone(&shared.rails), shared.me, shared.regions.clone()),
            None => return Err(ended()),
        };
        let rail = rails.open(nth).map_err(WhyIdle::Unopened)?;
        let fabric = rail.fabric();
        // The first of a fabric goes with the peer's first, and so on.
        let before = rails.wanted().fabrics.iter().take(nth).filter(|other| **other == fabric).count() as u8;
        let exchange = |card: Vec<u8>| self.call(&Word::Offer { fabric, nth: before, card: &card });
        let connected = UcxFlow::connect(rail, me, regions, self.options.clone(), exchange);
        let (flow, _) = connected.map_err(WhyIdle::Failed)?;
        let (handle, report) = (flow.handle(), flow.report().ok());
        let shared = self.shared.upgrade().ok_or_else(ended)?;
        if !self.peer.state().flows.iter().any(|flow| flow.number == self.control) {
            return Err(ended());
        }
        let way = Way::Rail { nth, fabric, report };
        connect::arrived(&shared, &self.peer, Arrival { link: Box::new(flow), handle, way }, self.instance);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ucx::{UcxError, UcxRail};
    use crate::{Access, Agent, AgentConfig, Descriptors, End, Op, Path, RailOptions, Run, Select};
    use forebay_transfer::HostBuffer;
    use std::time::Duration;
    use testkit::eventually;

    const BYTES: u64 = 32 << 20;

    #[test]
    fn a_rail_that_is_lost_leaves_every_byte_to_tcp_and_comes_back() {
        let rail = RailOptions { fabric: Fabric::Memory, devices: Vec::new() };
        if let Err(error @ UcxError::NoLibrary { .. }) = UcxRail::open(rail.clone()) {
            return testkit::skipped(format_args!("libucp.so.0 is not installed ({error})"));
        }
        let agent = |name| {
            let config = AgentConfig { rails: vec![rail.clone()], ..AgentConfig::named(name) };
            // No further flow that comes over the rail just after the others were cut.
            Agent::start(AgentConfig { flows_max: 1, ..config }).unwrap()
        };
        let (one, two) = (agent("one"), agent("two"));
        let buffers = [(); 2].map(|()| Arc::new(HostBuffer::new(BYTES as usize)));
        let here = one.register(buffers[0].clone(), Access::OPEN).unwrap();
        let there = two.register(buffers[1].clone(), Access::OPEN).unwrap();
        one.add_peer(&two.metadata()).unwrap();
        let blocks = |base| {
            Descriptors::from_runs([Run { address: base, len: 4096, count: BYTES / 4096, stride: 4096 }])
        };
        let local = one.prepare_local(&blocks(here.base()).unwrap()).unwrap();
        let remote = one.prepare_remote("two", &blocks(there.base()).unwrap()).unwrap();
        let request =
            one.request(Op::Write, (&local, Select::All), (&remote, Select::All), None, None).unwrap();
        let move_all = || {
            let (sender, receiver) = mpsc::channel();
            request.post(move |end| sender.send(end).unwrap()).unwrap();
            receiver
        };
        let limit = Duration::from_secs(30);
        assert_eq!(move_all().recv_timeout(limit), Ok(End::Done { bytes: BYTES }));
        let peer = one.peer("two").unwrap();
        for round in 0..8u64 {
            // At first it rests longer than this test takes.
            peer.state().rail_rests = if round < 7 { REST_DOUBLINGS } else { 0 };
            if round > 0 {
                begin(&one.shared, &peer);
            }
            eventually("the rail is taken", || peer.state().is_railed());
            buffers[0].write(0, &vec![round as u8 + 1; BYTES as usize]);
            let ended = move_all();
            std::thread::sleep(Duration::from_micros(700 * round));
            peer.state()
                .flows
                .iter()
                .filter(|flow| flow.way != Way::Tcp)
                .for_each(|flow| flow.handle.sever());
            assert_eq!(ended.recv_timeout(limit), Ok(End::Done { bytes: BYTES }), "round {round}");
            let mut moved = vec![0; BYTES as usize];
            assert!(buffers[1].read(0, &mut moved) && moved.iter().all(|byte| *byte == round as u8 + 1));
            eventually("its end is noted", || !peer.state().idle_rails.is_empty());
            assert!(matches!(peer.state().idle_rails[&0], WhyIdle::Lost(_)));
        }
        let stat = &one.stats()[0];
        assert_eq!(stat.counts.faults.iter().collect::<Vec<_>>(), [(&"rail_lost", &8)]);
        assert!(stat.counts.paths[&Path::Tcp].moved_bytes > 0);
        eventually("the rail is back", || peer.state().is_railed() && peer.state().idle_rails.is_empty());
    }
}
