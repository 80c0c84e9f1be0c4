//! The end of a ring that asks: it fills slots, hands out others for a GPU to publish, and takes
//! what came of them. Every slot that it filled comes back once.

use crate::atomics::{AtomicU64, Ordering};
use crate::layout::{CONTEXT_WORDS, Header, Layout, RESULT_WORDS};
use crate::message::{Completion, Context, ContextResult, ContextStatus, Request, Status};
use thiserror::Error;

/// Why a request was not posted. Nothing of it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotPosted {
    #[error("all {slots} slots are in use")]
    Full { slots: u16 },
    #[error("the consumer has closed the ring")]
    Closed,
    #[error("the request says {said} contexts, and {given} are given; a slot has {limit}")]
    Contexts { said: u16, given: usize, limit: u16 },
}

/// What a consumer must not say. The ring is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadCompletion {
    #[error("completion {number} is no completion")]
    Words { number: u64 },
    #[error("completion {number} is of slot {slot}, which has no request of user {user:#x}")]
    Slot { number: u64, slot: u16, user: u64 },
}

/// A slot that somebody else publishes: who writes `value` into this word of the ring, behind all
/// that the request and its contexts say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Armed {
    pub slot: u16,
    /// Where in the ring the sequence word lies.
    pub word: usize,
    pub value: u64,
}

/// How a request ended, and each of its contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reaped {
    pub completion: Completion,
    pub results: Vec<ContextResult>,
}

/// What is under way in a slot.
#[derive(Debug, Clone)]
struct UnderWay {
    user: u64,
    /// What the result of each context repeats; nothing is known of those that somebody else
    /// writes.
    echoes: Vec<Option<u16>>,
}

#[derive(Debug)]
pub struct Producer {
    layout: Layout,
    epoch: u64,
    posted: u64,
    /// How often each armed slot was used.
    generations: Vec<u64>,
    slots: Vec<Option<UnderWay>>,
    reaped: u64,
}

impl Producer {
    /// Of a ring that nobody else has posted to.
    pub fn new(layout: Layout, header: &Header) -> Producer {
        Producer {
            layout,
            epoch: header.epoch(),
            posted: 0,
            generations: vec![0; layout.armed().into()],
            slots: vec![None; layout.slots().into()],
            reaped: 0,
        }
    }

    /// Requests that have not come back.
    pub fn under_way(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Writes a request and publishes it. Gives its slot; [wake](crate::sleep) the consumer then.
    pub fn post(
        &mut self,
        ring: &[AtomicU64],
        request: &Request,
        contexts: &[Context],
    ) -> Result<u16, NotPosted> {
        if contexts.len() != usize::from(request.contexts) {
            return Err(self.wrong_contexts(request, contexts));
        }
        let slot = (self.posted % u64::from(self.layout.posted())) as u16;
        if self.slots[usize::from(slot)].is_some() {
            return Err(NotPosted::Full { slots: self.layout.posted() });
        }
        self.write(ring, slot, request, contexts)?;
        self.posted += 1;
        ring[self.sequence(slot)].store(self.posted, Ordering::Release);
        Ok(slot)
    }

    /// Writes a request for somebody else to publish, who may also write the contexts that are not
    /// given here.
    pub fn arm(
        &mut self,
        ring: &[AtomicU64],
        request: &Request,
        contexts: &[Context],
    ) -> Result<Armed, NotPosted> {
        if contexts.len() > usize::from(request.contexts) {
            return Err(self.wrong_contexts(request, contexts));
        }
        let first = self.layout.posted();
        let free = (first..self.layout.slots()).find(|slot| self.slots[usize::from(*slot)].is_none());
        let slot = free.ok_or(NotPosted::Full { slots: self.layout.armed() })?;
        self.write(ring, slot, request, contexts)?;
        let generation = &mut self.generations[usize::from(slot - first)];
        *generation += 1;
        let value = *generation;
        self.tell_armed(ring);
        Ok(Armed { slot, word: self.sequence(slot), value })
    }

    /// The next request that has ended, if there is one.
    pub fn reap(&mut self, ring: &[AtomicU64]) -> Result<Option<Reaped>, BadCompletion> {
        if !self.has_ended(ring) {
            return Ok(None);
        }
        let (number, at) = (self.reaped, self.layout.completion(self.reaped));
        let words = [0, 1, 2].map(|word| ring[at + word].load(Ordering::Relaxed));
        let completion = Completion::decode(words).ok_or(BadCompletion::Words { number })?;
        let Completion { slot, user, .. } = completion;
        let held = self.slots.get_mut(usize::from(slot)).and_then(Option::take);
        let under_way = held.filter(|held| held.user == user);
        let UnderWay { echoes, .. } = under_way.ok_or(BadCompletion::Slot { number, slot, user })?;
        // Of a request that was refused, the slot has the results of the one before.
        let has_results = matches!(completion.status, Status::Done | Status::Partial);
        let result = |(context, echo)| {
            if !has_results {
                return ContextResult::failed(ContextStatus::NotRead);
            }
            let at = self.layout.result(slot, context);
            let words: [u64; RESULT_WORDS] =
                std::array::from_fn(|word| ring[at + word].load(Ordering::Relaxed));
            ContextResult::decode(words, echo)
        };
        let results = (0..).zip(echoes).map(result).collect();
        self.reaped += 1;
        if slot >= self.layout.posted() {
            self.tell_armed(ring);
        }
        Ok(Some(Reaped { completion, results }))
    }

    /// Whether there is something to reap.
    pub fn has_ended(&self, ring: &[AtomicU64]) -> bool {
        let sequence = self.layout.completion(self.reaped) + 3;
        ring[sequence].load(Ordering::Acquire) == self.reaped + 1
    }

    fn write(
        &mut self,
        ring: &[AtomicU64],
        slot: u16,
        request: &Request,
        contexts: &[Context],
    ) -> Result<(), NotPosted> {
        if request.contexts > self.layout.contexts() {
            return Err(self.wrong_contexts(request, contexts));
        }
        if Header::of(ring).is_closed() {
            return Err(NotPosted::Closed);
        }
        let store = |at: usize, words: &[u64]| {
            words.iter().zip(&ring[at..]).for_each(|(value, word)| {
                word.store(*value, Ordering::Relaxed);
            })
        };
        for (context, number) in contexts.iter().zip(0..) {
            let words: [u64; CONTEXT_WORDS] = context.words();
            store(self.layout.context(slot, number), &words);
        }
        store(self.layout.request(slot), &request.words(self.epoch));
        let Request { user, lease, .. } = *request;
        let mut echoes: Vec<_> = contexts.iter().map(|context| Some(context.echo(user, lease))).collect();
        echoes.resize(request.contexts.into(), None);
        self.slots[usize::from(slot)] = Some(UnderWay { user, echoes });
        Ok(())
    }

    fn wrong_contexts(&self, request: &Request, contexts: &[Context]) -> NotPosted {
        let (said, given) = (request.contexts, contexts.len());
        NotPosted::Contexts { said, given, limit: self.layout.contexts() }
    }

    fn tell_armed(&self, ring: &[AtomicU64]) {
        let armed = self.slots[usize::from(self.layout.posted())..].iter().flatten().count();
        Header::of(ring).set_armed(armed as u64);
    }

    fn sequence(&self, slot: u16) -> usize {
        self.layout.request(slot) + 7
    }
}
