//! Brings flows to peers about, on threads of their own, and takes down what has ended. This file carries out what the
//! [`Line`](crate::line::Line) says and the counters advise; it must never decide who is spoken to.

use crate::flows::Advice;
use crate::line::Rest;
use crate::peer::{Flow, Peer};
use crate::seats::OnAdvice;
use crate::shared::Shared;
use crate::trouble::Trouble;
use forebay_links::tcp::{Broken, FlowError, FlowOptions, RefusalCode, TcpFlow};
use std::sync::{Arc, Weak};

/// How often, and how long apart, the regions of a peer that is gone are asked for again.
const FORGET_ATTEMPTS: u32 = 1_000;
const FORGET_AGAIN_US: u64 = 20_000;

type Connected = Result<(TcpFlow, forebay_links::tcp::Peer), FlowError>;

/// Brings the first flow about.
pub(crate) fn begin(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let instance = peer.instance;
    connect(shared, peer, instance, |shared, peer, connected| match connected {
        Ok((flow, found)) => arrived(shared, peer, flow, found.identity.instance),
        Err(error) => failed(shared, peer, &error),
    });
}

/// Connects on a thread of its own, and has `then` called there, unless the agent has ended meanwhile.
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
        let connected = TcpFlow::connect(address, me, regions, options);
        if let Some(shared) = weak.upgrade() {
            then(&shared, &its, connected);
        }
    });
    if let Err(error) = thread {
        otherwise(shared, peer, Err(FlowError::System(error)));
    }
}

/// A flow came about: it gets a seat, and those who wait may go.
fn arrived(shared: &Arc<Shared>, peer: &Arc<Peer>, flow: TcpFlow, instance: [u8; 16]) {
    let handle = flow.handle();
    let mut site = peer.site();
    if site.answered.is_some_and(|before| before != instance) {
        // What was known of the one before must never reach this one.
        if let Some(berth) = site.berth.take() {
            shared.yard.take_back(berth);
        }
    }
    site.answered = Some(instance);
    let on_advice = on_advice(shared, peer);
    let seated = site.berth(&shared.yard).seat(&shared.yard, flow, Arc::clone(&peer.gauge), on_advice);
    let seat = match seated {
        Ok(seat) => seat,
        Err(error) => {
            drop(site);
            let error = std::io::Error::other(error.to_string());
            return failed(shared, peer, &FlowError::System(error));
        }
    };
    let mut state = peer.state();
    if !state.line.connected(shared.keeper.now_us()) {
        drop(state);
        let flow = site.unseat(shared, seat);
        drop(site);
        return drop(flow);
    }
    let number = state.next_flow;
    state.next_flow += 1;
    state.flows.push(Flow { number, seat, handle: handle.clone() });
    peer.gauge.flows(state.flows.len());
    let waiting = state.take_waiting();
    drop(state);
    drop(site);
    let (weak, keeper, its) = (Arc::downgrade(shared), shared.keeper.clone(), Arc::clone(peer));
    handle.on_broken(move |why| keeper.soon(move || broken(&weak, &its, number, &why)));
    waiting.into_iter().for_each(|then| then(Ok(())));
}

/// No flow came about.
fn failed(shared: &Arc<Shared>, peer: &Arc<Peer>, error: &FlowError) {
    if let FlowError::Greeting { broken: Broken::Refused(refusal), .. } = error
        && refusal.code == RefusalCode::Instance
    {
        return bury(shared, peer, &Trouble::Restarted { peer: peer.name.clone() });
    }
    let mut state = peer.state();
    let why = error.to_string();
    state.why = Some(why.clone());
    let rest = state.line.failed(shared.keeper.now_us());
    let waiting = if is_an_answer(error) { state.take_waiting() } else { Vec::new() };
    drop(state);
    peer.gauge.fault("unconnected");
    for then in waiting {
        then(Err(Trouble::Unreachable { peer: peer.name.clone(), why: why.clone() }));
    }
    rest_until(shared, peer, rest);
}

/// Whether those who wait are better told now than after more attempts: somebody, if only the other machine's system, has
/// said no.
fn is_an_answer(error: &FlowError) -> bool {
    let said_no = |source: &std::io::Error| source.kind() == std::io::ErrorKind::ConnectionRefused;
    match error {
        FlowError::Connect { source, .. } | FlowError::System(source) => said_no(source),
        FlowError::Plain { .. } => true,
        FlowError::Greeting { broken, .. } => matches!(broken, Broken::Refused(_) | Broken::Bad(_)),
    }
}

fn rest_until(shared: &Arc<Shared>, peer: &Arc<Peer>, rest: Option<Rest>) {
    let Some(Rest { until_us }) = rest else { return };
    let (weak, its) = (Arc::downgrade(shared), Arc::clone(peer));
    shared.keeper.at(until_us, move || {
        let mut state = its.state();
        let waits = state.somebody_waits();
        let connect = state.line.rested(waits);
        drop(state);
        if let (true, Some(shared)) = (connect, weak.upgrade()) {
            begin(&shared, &its);
        }
    });
}

/// A flow has ended by itself. Where one is frozen the peer most likely is, so the others are not waited for.
fn broken(shared: &Weak<Shared>, peer: &Arc<Peer>, number: u64, why: &Broken) {
    let Some(shared) = shared.upgrade() else { return };
    let mut state = peer.state();
    let ended: Vec<Flow> = state.flows.extract_if(.., |flow| flow.number == number).collect();
    if ended.is_empty() {
        return;
    }
    if let Broken::Frozen { .. } = why {
        state.flows.iter().for_each(|flow| flow.handle.doubt());
    }
    state.lost = Some(why.clone());
    peer.gauge.flows(state.flows.len());
    let last = state.flows.is_empty();
    let rest = if last { state.line.broken(shared.keeper.now_us()) } else { None };
    drop(state);
    take_down(&shared, peer, &ended);
    rest_until(&shared, peer, rest);
}

/// Takes flows that have ended, or were severed, out of their seats.
fn take_down(shared: &Shared, peer: &Peer, ended: &[Flow]) {
    let flows: Vec<_> = {
        let mut site = peer.site();
        ended.iter().map(|flow| site.unseat(shared, flow.seat)).collect()
    };
    drop(flows);
}

/// The peer is gone for good. Nothing that was known of it can be used any more; what is under way fails.
pub(crate) fn bury(shared: &Arc<Shared>, peer: &Arc<Peer>, why: &Trouble) {
    let mut state = peer.state();
    state.line.die(why.clone());
    let waiting = state.take_waiting();
    let flows = std::mem::take(&mut state.flows);
    flows.iter().for_each(|flow| flow.handle.sever());
    peer.gauge.flows(0);
    drop(state);
    take_down(shared, peer, &flows);
    waiting.into_iter().for_each(|then| then(Err(why.clone())));
    forget(&Arc::downgrade(shared), peer, FORGET_ATTEMPTS);
}

/// Forgets a dead peer's regions, as soon as what uses them has ended, and gives its place back.
fn forget(weak: &Weak<Shared>, peer: &Arc<Peer>, attempts: u32) {
    let Some(shared) = weak.upgrade() else { return };
    if peer.forget_memory(&shared) {
        if let Some(berth) = peer.site().berth.take() {
            shared.yard.take_back(berth);
        }
    } else if attempts > 0 {
        let (weak, its) = (Weak::clone(weak), Arc::clone(peer));
        let again_us = shared.keeper.now_us() + FORGET_AGAIN_US;
        shared.keeper.at(again_us, move || forget(&weak, &its, attempts - 1));
    }
}

fn on_advice(shared: &Arc<Shared>, peer: &Arc<Peer>) -> OnAdvice {
    let (weak, keeper, its) = (Arc::downgrade(shared), shared.keeper.clone(), Arc::downgrade(peer));
    Arc::new(move |advice| {
        let (weak, its) = (Weak::clone(&weak), Weak::clone(&its));
        keeper.soon(move || {
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
    drop(state);
    connect(shared, peer, Some(instance), move |shared, peer, connected| {
        peer.state().growing = false;
        match connected {
            // It came too late if the others have ended: whoever wants one will ask.
            Ok((flow, _)) if !peer.state().flows.is_empty() => arrived(shared, peer, flow, instance),
            Ok(_) => {}
            Err(_) => peer.gauge.flow_refused(),
        }
    });
}

/// Lets the flow that came last finish what it has begun.
fn shrink(shared: &Arc<Shared>, peer: &Arc<Peer>) {
    let mut state = peer.state();
    if state.flows.len() < 2 {
        return;
    }
    let Some(ended) = state.flows.pop() else { return };
    peer.gauge.flows(state.flows.len());
    drop(state);
    let flow = peer.site().unseat(shared, ended.seat);
    let parting = std::thread::Builder::new().name("forebay-part".into()).spawn(move || drop(flow));
    // Without a thread the flow was dropped where it was, which only took longer.
    drop(parting);
}

impl crate::peer::Site {
    fn unseat(&mut self, shared: &Shared, seat: usize) -> Option<TcpFlow> {
        self.berth.as_mut().and_then(|berth| berth.unseat(&shared.yard, seat))
    }
}
