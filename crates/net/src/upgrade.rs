//! Takes a peer that was reached over TCP to the best rails that both ends have. What goes wrong
//! with a rail leaves the bytes on TCP, with the reason kept and counted. This file says which
//! rails are tried and when.

use crate::call_handler;
use crate::capabilities::{Capabilities, Question, WhyIdle};
use crate::peer::{Peer, Via};
use crate::shared::Shared;
use crate::tcp::{Broken, Flow, FlowHandle, FlowOptions};
use crate::transport::{self, TransportError, TransportInfo};
use forebay_transfer::Backoff;
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

/// After the last rail was lost, rails are tried again in so long; twice as long after each further
/// time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// Takes in a flow that came about over a rail, to the peer's instance.
type Arrive = fn(&Arc<Shared>, &Arc<Peer>, Flow, Via, [u8; 16]);

/// Tries the rails that both ends have, on a thread of its own. Without rails here nothing is
/// begun.
pub(crate) fn begin(shared: &Arc<Shared>, peer: &Arc<Peer>, arrive: Arrive) {
    if shared.rails.is_empty() {
        return;
    }
    let Some(attempt) = Attempt::new(shared, peer, arrive) else { return };
    let its = Arc::clone(peer);
    on_thread(move || attempt.run(), move || its.metrics.fault("rail_failed"));
}

/// Brings one more flow about over a rail that carries some. `then` hears whether it came.
pub(crate) fn one_more(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    rail: usize,
    arrive: Arrive,
    then: impl FnOnce(bool) + Send + Clone + 'static,
) {
    let Some(attempt) = Attempt::new(shared, peer, arrive) else { return then(false) };
    let otherwise = then.clone();
    on_thread(move || then(attempt.connect(rail).is_ok()), move || otherwise(false));
}

fn on_thread(work: impl FnOnce() + Send + 'static, otherwise: impl FnOnce()) {
    let thread = std::thread::Builder::new().name("forebay-rail".into()).spawn(work);
    if thread.is_err() {
        otherwise();
    }
}

/// Flows over rails have ended, the others of those rails live on.
pub(crate) fn lost(shared: &Arc<Shared>, peer: &Arc<Peer>, ended: &[Via], why: &Broken, arrive: Arrive) {
    let mut state = peer.state();
    let path = state.flows.iter().find(|flow| !flow.stands_by).map(|flow| flow.via.path());
    let mut lost = Vec::new();
    for via in ended {
        let Via::Rail { nth, info, .. } = via else { continue };
        if !state.flows.iter().any(|flow| flow.via.rail() == Some(*nth)) {
            state.idle_rails.insert(*nth, WhyIdle::Lost(why.clone()));
            peer.metrics.fault("rail_lost");
            lost.push(info.name);
        }
    }
    let railed = ended.iter().any(|via| via.rail().is_some());
    let back_on_tcp = railed && !state.flows.is_empty() && !state.is_railed();
    drop(state);
    // Without any path the peer itself is lost, which is told.
    if let Some(path) = path {
        lost.iter().for_each(|rail| peer.log.rail_lost(rail, why, path));
    }
    if back_on_tcp {
        again_later(shared, peer, arrive);
    }
}

/// Tries rails again after a pause, if the connection is there still.
fn again_later(shared: &Arc<Shared>, peer: &Arc<Peer>, arrive: Arrive) {
    let new = || Backoff::new(FIRST_PAUSE, PAUSE_MAX);
    let pause = peer.state().rail_backoff.get_or_insert_with(new).pause();
    let (weak, its) = (Arc::downgrade(shared), Arc::downgrade(peer));
    shared.timer.at(shared.timer.now_us() + pause.as_micros() as u64, move || {
        let (Some(shared), Some(peer)) = (weak.upgrade(), its.upgrade()) else { return };
        let state = peer.state();
        let wanted = !state.flows.is_empty() && !state.is_railed();
        drop(state);
        if wanted {
            begin(&shared, &peer, arrive);
        }
    });
}

/// An attempt to take one peer to rails. The agent may end meanwhile.
struct Attempt {
    shared: Weak<Shared>,
    peer: Arc<Peer>,
    /// The flow on which the peer is asked. Rails that come about after its end are not wanted.
    control: u64,
    handle: FlowHandle,
    instance: [u8; 16],
    options: FlowOptions,
    arrive: Arrive,
}

impl Attempt {
    fn new(shared: &Arc<Shared>, peer: &Arc<Peer>, arrive: Arrive) -> Option<Attempt> {
        // Under the lock of the site, so that the flow is to whom answered.
        let site = peer.site();
        let instance = site.answered?;
        let (control, handle) = peer.state().flows.first().map(|flow| (flow.number, flow.handle.clone()))?;
        drop(site);
        let options = FlowOptions { instance: Some(instance), ..shared.flow_options.clone() };
        let (weak, peer) = (Arc::downgrade(shared), Arc::clone(peer));
        Some(Attempt { shared: weak, peer, control, handle, instance, options, arrive })
    }

    fn run(&self) {
        let Some(rails) = self.shared.upgrade().map(|shared| Arc::clone(&shared.rails)) else { return };
        let own = rails.infos();
        let mut idle: Vec<Option<WhyIdle>> = match self.ask() {
            Ok(theirs) => own.iter().map(|info| theirs.why_idle(rails.host, info)).collect(),
            Err(why) => vec![Some(WhyIdle::Unasked(why)); own.len()],
        };
        // All rails of the best transport on which a flow comes about.
        let mut order: Vec<usize> = (0..own.len()).filter(|nth| idle[*nth].is_none()).collect();
        order.sort_by_key(|nth| own[*nth].rank);
        let mut carries: Option<TransportInfo> = None;
        for nth in order {
            match carries.filter(|better| *better != own[nth]) {
                Some(better) => idle[nth] = Some(WhyIdle::NotNeeded(better.name)),
                None => idle[nth] = self.connect(nth).err(),
            }
            if idle[nth].is_none() {
                carries = Some(own[nth]);
            }
        }
        self.note(&own, idle, carries.is_some());
    }

    /// Keeps and counts why rails carry nothing.
    fn note(&self, own: &[TransportInfo], idle: Vec<Option<WhyIdle>>, carries: bool) {
        let mut state = self.peer.state();
        if !state.flows.iter().any(|flow| flow.number == self.control) {
            return;
        }
        for (nth, why) in idle.into_iter().enumerate() {
            let Some(why) = why else { continue };
            if let Some(fault) = why.fault() {
                self.peer.metrics.fault(fault);
                self.peer.log.rail_not_used(own[nth].name, &why);
            }
            state.idle_rails.insert(nth, why);
        }
        // What never came about will not; what did and was lost may come back.
        let had_some = state.rail_backoff.is_some();
        drop(state);
        if let (false, true, Some(shared)) = (carries, had_some, self.shared.upgrade()) {
            again_later(&shared, &self.peer, self.arrive);
        }
    }

    /// Which rails the peer has.
    fn ask(&self) -> Result<Capabilities, String> {
        let answer = self.call(&Question::Capabilities)?;
        Capabilities::parse(&answer).ok_or_else(|| "its answer means nothing here".into())
    }

    /// Asks the peer, and waits for its answer.
    fn call(&self, question: &Question<'_>) -> Result<Vec<u8>, String> {
        let mut body = vec![call_handler::RAILS];
        question.put(&mut body);
        let (sender, receiver) = mpsc::sync_channel(1);
        self.handle.call(body, self.options.connect_limit_us, move |answer| drop(sender.send(answer)));
        match receiver.recv() {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(Broken::Ended.to_string()),
        }
    }

    /// Brings a flow about over a rail, and gives it a slot.
    fn connect(&self, nth: usize) -> Result<(), WhyIdle> {
        let ended = || WhyIdle::Lost(Broken::Ended);
        let (rails, me, regions) = match self.shared.upgrade() {
            Some(shared) => (Arc::clone(&shared.rails), shared.me, shared.regions.clone()),
            None => return Err(ended()),
        };
        let rail = rails.open(nth).map_err(WhyIdle::Unopened)?;
        let infos = rails.infos();
        let info = infos[nth];
        // The first of a transport goes with the peer's first, and so on.
        let before = infos[..nth].iter().filter(|other| **other == info).count() as u8;
        let exchange = |offer: Vec<u8>| {
            let question = Question::Offer { code: info.code, nth: before, offer: &offer };
            self.call(&question).map_err(TransportError::Declined)
        };
        let connected = transport::connect(rail, me, regions, &self.options, exchange);
        let (flow, _, report) = connected.map_err(WhyIdle::Failed)?;
        let shared = self.shared.upgrade().ok_or_else(ended)?;
        if !self.peer.state().flows.iter().any(|flow| flow.number == self.control) {
            return Err(ended());
        }
        (self.arrive)(&shared, &self.peer, flow, Via::Rail { nth, info, report }, self.instance);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Agent, AgentConfig, Descriptors, End, Op, RailOptions, Run, Select, TCP};
    use forebay_transfer::HostBuffer;
    use testkit::eventually;

    const BYTES: u64 = 32 << 20;

    #[test]
    fn a_rail_that_is_lost_leaves_every_byte_to_tcp_and_comes_back() {
        let rail = RailOptions::named("memory", Vec::new()).unwrap();
        if let Err(error) = rail.transport.open(&[]) {
            return testkit::skipped(format_args!("shared memory cannot be opened ({error})"));
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
            // At first it waits longer than this test takes.
            let first = if round < 7 { PAUSE_MAX } else { FIRST_PAUSE };
            peer.state().rail_backoff = Some(Backoff::new(first, PAUSE_MAX));
            if round > 0 {
                begin(&one.shared, &peer, crate::connect::arrived);
            }
            eventually("the rail is taken", || peer.state().is_railed());
            buffers[0].write(0, &vec![round as u8 + 1; BYTES as usize]);
            let ended = move_all();
            std::thread::sleep(Duration::from_micros(700 * round));
            peer.state()
                .flows
                .iter()
                .filter(|flow| flow.via.rail().is_some())
                .for_each(|flow| flow.handle.sever());
            assert_eq!(ended.recv_timeout(limit), Ok(End::Done { bytes: BYTES }), "round {round}");
            let mut moved = vec![0; BYTES as usize];
            assert!(buffers[1].read(0, &mut moved) && moved.iter().all(|byte| *byte == round as u8 + 1));
            eventually("its end is noted", || !peer.state().idle_rails.is_empty());
            assert!(matches!(peer.state().idle_rails[&0], WhyIdle::Lost(_)));
        }
        let stat = &one.stats()[0];
        assert_eq!(stat.counts.faults.iter().collect::<Vec<_>>(), [(&"rail_lost", &8)]);
        assert!(stat.counts.paths[TCP].moved_bytes > 0);
        eventually("the rail is back", || peer.state().is_railed() && peer.state().idle_rails.is_empty());
    }
}
