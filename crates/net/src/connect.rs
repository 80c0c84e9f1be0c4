//! Brings flows to peers about, on threads of their own, and takes down what has ended. This file
//! carries out what the
//! [`ConnectionState`](crate::connection_state::ConnectionState) says and the counters advise.

use crate::connection_state::Want;
use crate::endpoints::{BoundFlow, OnAdvice};
use crate::error::{PeerError, Unreachable};
use crate::flow_control::Advice;
use crate::peer::{Peer, PeerFlow, Via, WAITING_MAX};
use crate::shared::Shared;
use crate::tcp::{Broken, Flow, FlowError, FlowOptions, RefusalCode, UnreachableReason};
use crate::upgrade;
use std::sync::{Arc, Weak};

/// How often, and how long apart, the regions of a peer that is gone are asked for again.
const FORGET_ATTEMPTS: u32 = 1_000;
const FORGET_AGAIN_US: u64 = 20_000;

type Connected = Result<(Flow, crate::tcp::PeerInfo), FlowError>;

/// Calls `then` when the peer can be spoken to, at once if it can be now; or with the reason why
/// not, at the latest at `until_us` of the timer. Brings the connection about if there is none.
pub(crate) fn when_up(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    until_us: u64,
    then: impl FnOnce(Result<(), PeerError>) + Send + 'static,
) {
    let mut state = peer.state();
    let want = state.connection.want();
    let now = match &want {
        // While those who came before are told, it is told behind them.
        Want::Go if !state.waiting_are_told => Some(Ok(())),
        Want::Never(why) => Some(Err(why.clone())),
        Want::Go | Want::Wait | Want::Connect => None,
    };
    if let Some(result) = now {
        drop(state);
        return then(result);
    }
    let waits = state.wait(Box::new(then));
    drop(state);
    match waits {
        Err(then) if want == Want::Go => then(Ok(())),
        Err(then) => {
            let what = format!("{WAITING_MAX} requests wait for a connection to peer {}", peer.name);
            then(Err(PeerError::Full(what)));
        }
        Ok(number) => {
            let its = Arc::clone(peer);
            shared.timer.at(until_us, move || give_up(&its, number));
        }
    }
    if want == Want::Connect {
        begin(shared, peer);
    }
}

/// Somebody has waited for long enough.
fn give_up(peer: &Peer, number: u64) {
    let mut state = peer.state();
    let Some(then) = state.give_up(number) else { return };
    let known = state.unreached.as_ref().map(|unreached| unreached.why.clone());
    let why = known.unwrap_or_else(|| "there is no answer yet".into());
    drop(state);
    then(Err(PeerError::Unreachable { peer: peer.name.clone(), why }));
}

/// Brings the first flow about.
pub(crate) fn begin(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let instance = peer.instance;
    connect(shared, peer, instance, |shared, peer, connected| match connected {
        Ok((flow, found)) => {
            arrived(shared, peer, flow, Via::Tcp, found.identity.instance);
            upgrade::begin(shared, peer, arrived);
        }
        Err(error) => failed(shared, peer, &error),
    });
}

/// Connects on a thread of its own, and has `then` called there, unless the agent has ended
/// meanwhile.
fn connect(
    shared: &Arc<Shared>,
    peer: &Arc<Peer>,
    instance: Option<[u8; 16]>,
    then: impl FnOnce(&Arc<Shared>, &Arc<Peer>, Connected) + Send + Clone + 'static,
) {
    let Some(address) = peer.address else {
        let nowhere = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "it does not listen");
        return then(shared, peer, Err(FlowError::System(nowhere)));
    };
    let options = FlowOptions { instance, ..shared.flow_options.clone() };
    let (me, regions) = (shared.me, shared.regions.clone());
    let (weak, its) = (Arc::downgrade(shared), Arc::clone(peer));
    let otherwise = then.clone();
    let thread = std::thread::Builder::new().name("forebay-connect".into()).spawn(move || {
        let connected = Flow::connect(address, me, regions, options);
        if let Some(shared) = weak.upgrade() {
            then(&shared, &its, connected);
        }
    });
    if let Err(error) = thread {
        otherwise(shared, peer, Err(FlowError::System(error)));
    }
}

/// A flow came about: it gets a slot, and those who wait may go.
pub(crate) fn arrived(shared: &Arc<Shared>, peer: &Arc<Peer>, flow: Flow, via: Via, instance: [u8; 16]) {
    let handle = flow.handle();
    let mut site = peer.site();
    let mut left = None;
    if site.answered.is_some_and(|before| before != instance) {
        if !peer.state().flows.is_empty() {
            // It was asked for when another answered than does now, and that one has ended.
            drop(site);
            return drop(flow);
        }
        // What was known of the one before must never reach this one.
        left = site.endpoint.take().map(|endpoint| shared.pool.take_back(endpoint));
    }
    site.answered = Some(instance);
    let number = peer.state().number_flow();
    let bound = BoundFlow {
        number,
        flow,
        handle: handle.clone(),
        path: via.path(),
        metrics: Arc::clone(&peer.metrics),
        log: Arc::clone(&peer.log),
        on_advice: on_advice(shared, peer),
    };
    let stand_in = via.rail().and_then(|_| peer.state().slot_over_tcp());
    let slot = match site.endpoint(&shared.pool).bind(&shared.pool, bound, stand_in) {
        Ok(slot) => slot,
        Err(error) => {
            drop(site);
            let error = std::io::Error::other(error.to_string());
            return failed(shared, peer, &FlowError::System(error));
        }
    };
    let mut state = peer.state();
    if !state.connection.connected(shared.timer.now_us()) {
        drop(state);
        let flow = site.unbind(shared, slot, number);
        drop(site);
        return drop(flow);
    }
    state.unreached = None;
    if state.flows.is_empty() {
        peer.log.up();
        // What is known of rails was of another connection.
        state.idle_rails.clear();
        state.rail_backoff = None;
    }
    if let Via::Rail { nth, info, .. } = &via {
        state.idle_rails.remove(nth);
        if !state.is_railed() {
            peer.log.rail_up(info.name, info.path);
        }
    }
    state.flows.push(PeerFlow { number, slot, handle: handle.clone(), via, stands_by: false });
    let tells = !std::mem::replace(&mut state.waiting_are_told, true);
    drop(state);
    drop(site);
    arrange(shared, peer);
    let (weak, timer, its) = (Arc::downgrade(shared), shared.timer.clone(), Arc::clone(peer));
    handle.on_broken(move |why| timer.soon(move || broken(&weak, &its, number, &why)));
    if tells {
        tell_waiting(peer);
    }
    // It may wait for what it has begun.
    drop(left);
}

/// Tells those who wait for a connection that there is one, in the order in which they came, and
/// those too who come meanwhile.
fn tell_waiting(peer: &Peer) {
    loop {
        let mut state = peer.state();
        let waiting = state.take_waiting();
        if waiting.is_empty() {
            state.waiting_are_told = false;
            return;
        }
        drop(state);
        waiting.into_iter().for_each(|then| then(Ok(())));
    }
}

/// Has bytes go over rails where there are any, and over TCP otherwise.
fn arrange(shared: &Shared, peer: &Peer) {
    let site = peer.site();
    let mut state = peer.state();
    let railed = state.is_railed();
    let mut changed = Vec::new();
    for flow in &mut state.flows {
        let stands_by = railed && flow.via.rail().is_none();
        if stands_by != flow.stands_by {
            flow.stands_by = stands_by;
            changed.push((flow.slot, !stands_by));
        }
    }
    peer.metrics.flows(state.at_work());
    drop(state);
    if let Some(endpoint) = &site.endpoint {
        changed.into_iter().for_each(|(slot, up)| endpoint.set_up(&shared.pool, slot, up));
    }
}

/// No flow came about.
fn failed(shared: &Arc<Shared>, peer: &Arc<Peer>, error: &FlowError) {
    if let FlowError::Greeting { broken: Broken::Refused(refusal), .. } = error
        && refusal.code == RefusalCode::Instance
    {
        return bury(shared, peer, &PeerError::Restarted { peer: peer.name.clone() });
    }
    let (reason, why) = (UnreachableReason::from(error), error.to_string());
    let mut state = peer.state();
    let unreached = Unreachable { reason, why: why.clone() };
    peer.log.unreached(state.unreached.as_ref(), &unreached);
    state.unreached = Some(unreached);
    let pause = state.connection.failed(shared.timer.now_us());
    let waiting = if is_an_answer(error) { state.take_waiting() } else { Vec::new() };
    drop(state);
    peer.metrics.count(|counts| {
        *counts.faults.entry("unconnected").or_default() += 1;
        *counts.unreached.entry(reason).or_default() += 1;
    });
    for then in waiting {
        then(Err(PeerError::Unreachable { peer: peer.name.clone(), why: why.clone() }));
    }
    back_off(shared, peer, pause);
}

/// Whether those who wait are better told now than after more attempts: somebody has said no, if
/// only the other machine's system, or this end for want of trust.
fn is_an_answer(error: &FlowError) -> bool {
    let said_no = |source: &std::io::Error| source.kind() == std::io::ErrorKind::ConnectionRefused;
    match error {
        FlowError::Connect { source, .. } | FlowError::System(source) => said_no(source),
        FlowError::Plain { .. } => true,
        FlowError::Greeting { broken, .. } => {
            matches!(broken, Broken::Refused(_) | Broken::Turned(_) | Broken::Tls(_) | Broken::Bad(_))
        }
    }
}

fn back_off(shared: &Arc<Shared>, peer: &Arc<Peer>, until_us: Option<u64>) {
    let Some(until_us) = until_us else { return };
    let (weak, its) = (Arc::downgrade(shared), Arc::clone(peer));
    shared.timer.at(until_us, move || {
        let mut state = its.state();
        let waits = state.somebody_waits();
        let connect = state.connection.rested(waits);
        drop(state);
        if let (true, Some(shared)) = (connect, weak.upgrade()) {
            begin(&shared, &its);
        }
    });
}

/// A flow has ended by itself. Where it shows that the peer is frozen, the others are not waited
/// for.
fn broken(shared: &Weak<Shared>, peer: &Arc<Peer>, number: u64, why: &Broken) {
    let Some(shared) = shared.upgrade() else { return };
    let mut state = peer.state();
    let ended: Vec<PeerFlow> = state.flows.extract_if(.., |flow| flow.number == number).collect();
    let Some(via) = ended.first().map(|flow| flow.via.clone()) else { return };
    if let Broken::Frozen { .. } = why {
        let doubtful = |flow: &&PeerFlow| via.shows_a_frozen_peer() || flow.via.path() == via.path();
        state.flows.iter().filter(doubtful).for_each(|flow| flow.handle.doubt());
    }
    state.lost = Some(why.clone());
    let last = state.flows.is_empty();
    if last {
        peer.log.lost(why);
        peer.opened.clear();
    }
    let pause = if last { state.connection.broken(shared.timer.now_us()) } else { None };
    drop(state);
    // What takes over is there before what has ended goes.
    arrange(&shared, peer);
    take_down(&shared, peer, &ended);
    let ended: Vec<Via> = ended.into_iter().map(|flow| flow.via).collect();
    upgrade::lost(&shared, peer, &ended, why, arrived);
    back_off(&shared, peer, pause);
}

/// Takes flows that have ended, or were severed, out of their slots.
fn take_down(shared: &Shared, peer: &Peer, ended: &[PeerFlow]) {
    let flows: Vec<_> = {
        let mut site = peer.site();
        ended.iter().map(|flow| site.unbind(shared, flow.slot, flow.number)).collect()
    };
    drop(flows);
}

/// The peer is gone for good. Nothing that was known of it can be used any more; what is under way
/// fails.
pub(crate) fn bury(shared: &Arc<Shared>, peer: &Arc<Peer>, why: &PeerError) {
    let mut state = peer.state();
    state.connection.die(why.clone());
    let waiting = state.take_waiting();
    let flows = std::mem::take(&mut state.flows);
    flows.iter().for_each(|flow| flow.handle.sever());
    peer.metrics.flows(0);
    drop(state);
    peer.opened.clear();
    take_down(shared, peer, &flows);
    waiting.into_iter().for_each(|then| then(Err(why.clone())));
    forget(&Arc::downgrade(shared), peer, FORGET_ATTEMPTS);
}

/// Forgets a dead peer's regions, as soon as what uses them has ended, and gives its place back.
fn forget(weak: &Weak<Shared>, peer: &Arc<Peer>, attempts: u32) {
    let Some(shared) = weak.upgrade() else { return };
    if peer.forget_memory(&shared) {
        let endpoint = peer.site().endpoint.take();
        drop(endpoint.map(|endpoint| shared.pool.take_back(endpoint)));
    } else if attempts > 0 {
        let (weak, its) = (Weak::clone(weak), Arc::clone(peer));
        let again_us = shared.timer.now_us() + FORGET_AGAIN_US;
        shared.timer.at(again_us, move || forget(&weak, &its, attempts - 1));
    }
}

fn on_advice(shared: &Arc<Shared>, peer: &Arc<Peer>) -> OnAdvice {
    let (weak, timer, its) = (Arc::downgrade(shared), shared.timer.clone(), Arc::downgrade(peer));
    Arc::new(move |advice| {
        let (weak, its) = (Weak::clone(&weak), Weak::clone(&its));
        timer.soon(move || {
            if let (Some(shared), Some(peer)) = (weak.upgrade(), its.upgrade()) {
                match advice {
                    Advice::Add => grow(&shared, &peer),
                    Advice::Drop => shrink(&shared, &peer),
                    Advice::Stay => {}
                }
            }
        });
    })
}

/// Brings one more flow about, to the same instance.
fn grow(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let Some(instance) = peer.site().answered else { return };
    let mut state = peer.state();
    if state.growing || state.flows.is_empty() {
        return;
    }
    state.growing = true;
    let rail = state.lightest_rail();
    drop(state);
    if let Some(rail) = rail {
        let its = Arc::clone(peer);
        return upgrade::one_more(shared, peer, rail, arrived, move |came| {
            its.state().growing = false;
            if !came {
                its.metrics.flow_refused();
            }
        });
    }
    connect(shared, peer, Some(instance), move |shared, peer, connected| {
        peer.state().growing = false;
        match connected {
            // It came too late if the others have ended: whoever wants one will ask.
            Ok((flow, _)) if !peer.state().flows.is_empty() => {
                arrived(shared, peer, flow, Via::Tcp, instance);
            }
            Ok(_) => {}
            Err(_) => peer.metrics.flow_refused(),
        }
    });
}

/// Lets the flow that came last finish what it has begun.
fn shrink(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let mut state = peer.state();
    let last = state.flows.iter().rposition(|flow| !flow.stands_by);
    let Some(last) = last.filter(|_| state.at_work() > 1) else { return };
    let ended = state.flows.remove(last);
    peer.metrics.flows(state.at_work());
    drop(state);
    let flow = peer.site().unbind(shared, ended.slot, ended.number);
    let parting = std::thread::Builder::new().name("forebay-part".into()).spawn(move || drop(flow));
    // Without a thread the flow was dropped where it was, which only took longer.
    drop(parting);
}

impl crate::peer::Site {
    fn unbind(&mut self, shared: &Shared, slot: usize, number: u64) -> Option<Flow> {
        self.endpoint.as_mut().and_then(|endpoint| endpoint.unbind(&shared.pool, slot, number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Agent, AgentConfig};

    /// Two instances of one peer, and an agent that is connected to the first or the second.
    struct Rig {
        one: Agent,
        instances: [Agent; 2],
        peer: Arc<Peer>,
    }

    impl Rig {
        fn connected_to(nth: usize) -> Rig {
            let agent = |name| Agent::start(AgentConfig::named(name)).unwrap();
            let (one, instances) = (agent("one"), [agent("two"), agent("two")]);
            one.add_address("two", instances[nth].address().unwrap()).unwrap();
            one.connect("two").unwrap();
            let peer = one.peer("two").unwrap();
            Rig { one, instances, peer }
        }

        /// A flow to this instance comes about.
        fn arrives(&self, nth: usize) {
            let (me, regions) = (self.one.shared.me, self.one.shared.regions.clone());
            let address = self.instances[nth].address().unwrap();
            let (flow, found) = Flow::connect(address, me, regions, FlowOptions::default()).unwrap();
            arrived(&self.one.shared, &self.peer, flow, Via::Tcp, found.identity.instance);
        }
    }

    #[test]
    fn a_further_flow_to_the_instance_before_takes_nothing_from_the_one_that_answers_now() {
        let rig = Rig::connected_to(1);
        let place = || rig.peer.site().endpoint(&rig.one.shared.pool).place;
        let before = place();
        // It was asked for when the old one answered, and came about when that had ended.
        rig.arrives(0);
        assert_eq!(rig.peer.site().answered, Some(rig.instances[1].identity().instance));
        assert_eq!((place(), rig.peer.state().flows.len()), (before, 1));
    }

    #[test]
    fn the_end_of_a_flow_to_the_instance_before_unseats_nobody_of_the_one_that_answers_now() {
        let rig = Rig::connected_to(0);
        // The flow has broken, and the new one is there before it has left its slot.
        let ended = std::mem::take(&mut rig.peer.state().flows);
        rig.arrives(1);
        take_down(&rig.one.shared, &rig.peer, &ended);
        assert_eq!(ended[0].handle.stats().broken, Some(Broken::Ended), "it was left in its slot");
        let flow = rig.peer.flow().unwrap();
        assert_eq!((rig.peer.state().flows.len(), flow.stats().broken), (1, None));
    }
}
