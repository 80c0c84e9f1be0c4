//! What a node answers beside its memory: calls go to a [`Service`], its replies come back from any
//! thread. This file carries them and bounds them.

use super::error::Broken;
use super::frame::{CALL_BYTES_MAX, CALLS_MAX, DATA_BYTES_MAX, Frame};
use super::greeting::Identity;
use forebay_transfer::lock::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of replies at most that wait for a peer to take them. What comes on top is refused.
const REPLY_BYTES_MAX: usize = 8 << 20;

/// Answers what peers ask beside memory.
pub trait Service: Send + Sync {
    /// Called on the connection's thread, which moves no byte meanwhile: be quick, keep `reply` and
    /// answer from another thread what takes time.
    fn call(&self, from: Identity, body: Vec<u8>, reply: Reply);

    /// The last connection of this instance has ended. No other of the same instance is let in
    /// before this returns, so be quick, and wait for no peer.
    fn gone(&self, from: Identity);
}

/// The right to answer one call, once. Dropped, it refuses.
pub struct Reply {
    number: u64,
    queue: Option<Arc<AnswerQueue>>,
}

impl Reply {
    /// Answers. More than [`CALL_BYTES_MAX`] bytes are refused instead.
    pub fn send(self, body: Vec<u8>) {
        self.try_send(body);
    }

    /// The same, for who has to know if the peer will never hear it: `false`, if it was refused or
    /// the connection has ended.
    pub fn try_send(self, body: Vec<u8>) -> bool {
        let bytes = body.len();
        if bytes <= CALL_BYTES_MAX as usize {
            return self.answer(Ok(body));
        }
        self.answer(Err(format!("the reply has {bytes} bytes; allowed: {CALL_BYTES_MAX}")));
        false
    }

    /// Says why there is no answer. Of long reasons the peer hears the first 256 bytes.
    pub fn refuse(self, why: String) {
        self.answer(Err(why));
    }

    fn answer(mut self, answer: Answer) -> bool {
        self.queue.take().is_some_and(|queue| queue.put(self.number, answer))
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.put(self.number, Err("the node gave no answer".into()));
        }
    }
}

type Answer = Result<Vec<u8>, String>;

/// Where the answers of one connection wait for its thread.
struct AnswerQueue {
    state: Mutex<Waiting>,
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Waiting {
    answers: VecDeque<(u64, Answer)>,
    bytes: usize,
    /// The connection's thread looks here again before it sleeps.
    awake: bool,
    closed: bool,
}

impl AnswerQueue {
    /// Says whether the answer goes out as it is.
    fn put(&self, number: u64, answer: Answer) -> bool {
        let mut waiting = self.state.lock();
        if waiting.closed {
            return false;
        }
        let bytes = answer.as_ref().map_or(0, Vec::len);
        let fits = waiting.bytes + bytes <= REPLY_BYTES_MAX;
        let full = || format!("more than {REPLY_BYTES_MAX} bytes of replies wait for this peer to take them");
        waiting.bytes += if fits { bytes } else { 0 };
        waiting.answers.push_back((number, if fits { answer } else { Err(full()) }));
        let asleep = !std::mem::replace(&mut waiting.awake, true);
        drop(waiting);
        if asleep {
            (self.wake)();
        }
        fits
    }
}

/// Where the calls of one connection come in and their answers go out.
pub(super) struct CallSession {
    service: Option<Arc<dyn Service>>,
    queue: Arc<AnswerQueue>,
    last_number: u64,
    unanswered: u16,
}

impl CallSession {
    /// `wake`: called, from any thread, when there is an answer to be sent.
    pub fn new(service: Option<Arc<dyn Service>>, wake: impl Fn() + Send + Sync + 'static) -> CallSession {
        let queue = Arc::new(AnswerQueue { state: Mutex::default(), wake: Box::new(wake) });
        CallSession { service, queue, last_number: 0, unanswered: 0 }
    }

    /// Hands a call to the service. `closing`: the node begins nothing new.
    pub fn call(&mut self, from: Identity, number: u64, body: Vec<u8>, closing: bool) -> Result<(), Broken> {
        let unexpected = |what| Err(Broken::unexpected(what, number));
        if number <= self.last_number {
            return unexpected("a call out of order");
        }
        if self.unanswered >= CALLS_MAX {
            return unexpected("more calls than may be unanswered");
        }
        self.last_number = number;
        self.unanswered += 1;
        self.queue.state.lock().awake = true;
        let reply = Reply { number, queue: Some(Arc::clone(&self.queue)) };
        match &self.service {
            _ if closing => reply.refuse("the node is about to end".into()),
            Some(service) => service.call(from, body, reply),
            None => reply.refuse("this node answers no calls".into()),
        }
        Ok(())
    }

    /// Appends answers that are ready, no more than about one DATA at a time. To be called again
    /// until it appends none.
    pub fn tell(&mut self, out: &mut Vec<u8>) {
        let before = out.len();
        while out.len() - before < DATA_BYTES_MAX as usize {
            let mut waiting = self.queue.state.lock();
            let Some((number, answer)) = waiting.answers.pop_front() else {
                waiting.awake = false;
                return;
            };
            waiting.bytes -= answer.as_ref().map_or(0, Vec::len);
            drop(waiting);
            self.unanswered -= 1;
            let frame = match answer {
                Ok(body) => Frame::Reply(body),
                Err(why) => Frame::Declined(why),
            };
            frame.put(number, out);
        }
    }

    /// Whether every call was answered.
    pub fn is_idle(&self) -> bool {
        self.unanswered == 0
    }
}

impl Drop for CallSession {
    fn drop(&mut self) {
        let mut waiting = self.queue.state.lock();
        waiting.closed = true;
        waiting.answers.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Default)]
    struct Keep(Mutex<Vec<Reply>>);

    impl Service for Keep {
        fn call(&self, _from: Identity, _body: Vec<u8>, reply: Reply) {
            self.0.lock().push(reply);
        }

        fn gone(&self, _from: Identity) {}
    }

    fn session() -> (CallSession, Arc<Keep>, Arc<AtomicU32>) {
        let (keep, wakes) = (Arc::new(Keep::default()), Arc::new(AtomicU32::new(0)));
        let counter = Arc::clone(&wakes);
        let wake = move || {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let session = CallSession::new(Some(Arc::clone(&keep) as _), wake);
        (session, keep, wakes)
    }

    const FROM: Identity = Identity { node: [1; 16], instance: [2; 16] };

    #[test]
    fn a_sleeping_connection_is_woken_once_for_all_answers_and_one_at_work_never() {
        let (mut session, keep, wakes) = session();
        for number in 1..=3 {
            session.call(FROM, number, vec![], false).unwrap();
        }
        keep.0.lock().pop().unwrap().send(vec![1]);
        assert_eq!(wakes.load(Ordering::Relaxed), 0, "it looks before it sleeps");
        let mut out = Vec::new();
        session.tell(&mut out);
        keep.0.lock().clear();
        assert_eq!(wakes.load(Ordering::Relaxed), 1);
        assert!(!session.is_idle());
        session.tell(&mut out);
        assert!(session.is_idle(), "dropped replies are answers");
    }

    #[test]
    fn replies_that_nobody_takes_are_bounded_in_bytes() {
        let (mut session, keep, _) = session();
        for number in 1..=CALLS_MAX.into() {
            session.call(FROM, number, vec![], false).unwrap();
        }
        assert!(session.call(FROM, 1_000, vec![], false).is_err(), "one call more than may be unanswered");
        let replies = std::mem::take(&mut *keep.0.lock());
        let sent = replies.into_iter().map(|reply| reply.try_send(vec![0; CALL_BYTES_MAX as usize]));
        assert_eq!(sent.filter(|sent| *sent).count(), REPLY_BYTES_MAX / CALL_BYTES_MAX as usize);
        assert!(session.queue.state.lock().bytes <= REPLY_BYTES_MAX);
        let mut out = Vec::new();
        while !session.is_idle() {
            session.tell(&mut out);
        }
        assert!(out.len() > REPLY_BYTES_MAX && out.len() < 2 * REPLY_BYTES_MAX, "{}", out.len());
        assert_eq!(session.queue.state.lock().bytes, 0);
    }

    #[test]
    fn an_answer_after_the_connection_has_ended_goes_nowhere() {
        let (mut session, keep, wakes) = session();
        session.call(FROM, 1, vec![], false).unwrap();
        session.tell(&mut Vec::new());
        drop(session);
        assert!(!keep.0.lock().pop().unwrap().try_send(vec![1]));
        assert_eq!(wakes.load(Ordering::Relaxed), 0);
    }
}
