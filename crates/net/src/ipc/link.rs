//! A link of the mover on which a GPU of this end copies to and from a peer's. Each operation gets
//! its grant from the owner, copies, and gives the grant back: only then has it ended. It counts
//! only if the owner says that the grant was good until then.

use super::messages::{Answer, Question};
use crate::peer_metrics::{IPC, PeerMetrics};
use crate::tcp::{CallError, FlowHandle, PeerRegions};
use crate::timer::Timer;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Completion, Ipc, Link, LinkOp, Memory, Outcome, Place};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often, and how long apart, an owner is told again that a grant is not used any more, where
/// the connection was lost. Without it the owner keeps the memory as long as this process lives.
const END_ATTEMPTS: u32 = 60;
const END_AGAIN_US: u64 = 1_000_000;

/// What grants of this process's agent are called. An owner never sees the same one twice.
pub(crate) type GrantNumbers = Arc<AtomicU64>;

/// Called once: with a connection to the peer, or with none where there will be none.
pub(crate) type OnFlow = Box<dyn FnOnce(Option<FlowHandle>) + Send>;

/// What the link is joined to while a peer has it.
pub(crate) struct Bound {
    pub ipc: Arc<dyn Ipc>,
    pub place: Place,
    pub regions: PeerRegions,
    pub numbers: GrantNumbers,
    pub metrics: Arc<PeerMetrics>,
    pub timer: Timer,
    pub answer_limit_us: u64,
    /// A connection that is there.
    pub flow: Box<dyn Fn() -> Option<FlowHandle> + Send + Sync>,
    /// One that comes about if there is none.
    pub reach: Box<dyn Fn(OnFlow) + Send + Sync>,
    /// The first byte of calls about memory of GPUs.
    pub channel: u8,
}

/// The link, in its place among the mover's for good.
#[derive(Clone, Default)]
pub(crate) struct IpcLink(Arc<Mutex<Option<Arc<Bound>>>>);

impl IpcLink {
    pub fn bind(&self, bound: Bound) {
        *self.0.lock() = Some(Arc::new(bound));
    }
}

impl Link for IpcLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let bound = self.0.lock().clone();
        let Some(bound) = bound else { return denied(done, "there is no connection".into()) };
        let (metrics, bytes) = (Arc::clone(&bound.metrics), op.bytes);
        let began_us = metrics.copy_began(IPC, bytes);
        let done = done.inspect(move |outcome| metrics.copy_ended(IPC, began_us, bytes, outcome));
        begin(&bound, op, memory, done);
    }
}

/// Another attempt would end as this one, and there is no other path: whoever has submitted the
/// transfer goes on over TCP.
fn denied(done: Completion, error: String) {
    done.finish(Outcome::Denied { error });
}

/// Asks the owner, and copies if it says yes.
fn begin(bound: &Arc<Bound>, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
    let (op_kind, command) = match bound.regions.command(&op) {
        Ok(request) => request,
        Err(why) => return denied(done, why),
    };
    let Some(flow) = (bound.flow)() else { return denied(done, "there is no connection".into()) };
    let number = bound.numbers.fetch_add(1, Ordering::Relaxed) + 1;
    let (own, memory) = (Arc::clone(bound), Arc::clone(memory));
    ask(bound, &flow, &Question::Begin { number, op_kind, command }, move |answer| match answer {
        Ok(Answer::Yes(_)) => copy(own, number, &op, &memory, done),
        Ok(Answer::Fault(fault)) => denied(done, fault.to_string()),
        Ok(_) => denied(done, "the peer's answer means nothing here".into()),
        Err(why) => {
            // It may have said yes, and nobody heard it.
            if !matches!(why, CallError::Refused(_) | CallError::TooLong { .. } | CallError::TooMany) {
                end_later(own, number, END_ATTEMPTS);
            }
            denied(done, why.to_string());
        }
    });
}

fn copy(bound: Arc<Bound>, number: u64, op: &LinkOp, memory: &Memory, done: Completion) {
    let (own, bytes) = (Arc::clone(&bound), op.bytes);
    let on_copied = move |copied: Result<(), String>| end(own, number, copied.map(|()| bytes), done);
    bound.ipc.copy(bound.place, op, memory, Box::new(on_copied));
}

/// Nothing of the operation is under way any more. Tells the owner, and ends it.
fn end(bound: Arc<Bound>, number: u64, copied: Result<u64, String>, done: Completion) {
    let Some(flow) = (bound.flow)() else {
        end_later(bound, number, END_ATTEMPTS);
        return denied(done, "the connection was lost".into());
    };
    let own = Arc::clone(&bound);
    ask(&bound, &flow, &Question::End { number }, move |answer| match (copied, answer) {
        (Ok(bytes), Ok(Answer::Yes(_))) => done.finish(Outcome::Moved { bytes }),
        (Err(why), Ok(_)) => denied(done, why),
        (Ok(_), Ok(Answer::Fault(fault))) => denied(done, fault.to_string()),
        (Ok(_), Ok(_)) => denied(done, "the peer's answer means nothing here".into()),
        (_, Err(why)) => {
            end_later(own, number, END_ATTEMPTS);
            denied(done, why.to_string());
        }
    });
}

/// Tells the owner once there is a connection again. A peer that is gone for good needs no telling.
fn end_later(bound: Arc<Bound>, number: u64, attempts: u32) {
    let own = Arc::clone(&bound);
    let again = move || {
        let bound = Arc::clone(&own);
        (own.reach)(Box::new(move |flow| {
            let Some(flow) = flow else { return };
            let own = Arc::clone(&bound);
            ask(&bound, &flow, &Question::End { number }, move |answer| {
                if answer.is_err() && attempts > 1 {
                    let timer = own.timer.clone();
                    timer.at(timer.now_us() + END_AGAIN_US, move || end_later(own, number, attempts - 1));
                }
            });
        }));
    };
    // Not on this thread, which may be the lost connection's own.
    bound.timer.soon(again);
}

fn ask(
    bound: &Bound,
    flow: &FlowHandle,
    question: &Question,
    on_answer: impl FnOnce(Result<Answer, CallError>) + Send + 'static,
) {
    let mut body = vec![bound.channel];
    question.put(&mut body);
    flow.call(body, bound.answer_limit_us, move |reply| {
        let refused = || CallError::Refused("the peer's answer means nothing here".into());
        on_answer(reply.and_then(|bytes| Answer::parse(&bytes).ok_or_else(refused)));
    });
}
