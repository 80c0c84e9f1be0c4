//! The end of a ring that carries out what is asked. Sans-IO: it says what is to be done, and is
//! told what came of it. It copies every word once before it looks at it, for the producer may be
//! anybody, and write what it likes at any time.

use crate::atomics::{AtomicU64, Ordering};
use crate::layout::{Header, Layout, REQUEST_WORDS};
use crate::message::{BadRequest, Completion, Context, ContextResult, ContextStatus, Op, Request, Status};
use thiserror::Error;

/// What a producer must not do: its ring is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    #[error("slot {slot}: the sequence word is {word}; allowed are {before} and {expected}")]
    Sequence {
        slot: u16,
        word: u64,
        /// What it said before.
        before: u64,
        /// What it says when the next request is whole.
        expected: u64,
    },
    #[error("slot {slot} was published again before its request had ended")]
    Overrun { slot: u16 },
}

/// A request under way, which ends once: by [`Consumer::end`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request has to end"]
pub struct Ticket {
    slot: u16,
    user: u64,
    /// What the result of each context repeats.
    echoes: Vec<u16>,
}

/// A request that is to be carried out.
#[derive(Debug, PartialEq, Eq)]
pub struct Work {
    pub ticket: Ticket,
    pub request: Request,
    pub contexts: Vec<Context>,
}

/// What was found in a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    Work(Work),
    /// The request of this slot is wanted no more. It ends as any other, soon.
    Cancelled {
        slot: u16,
    },
    /// It had nothing to do, or was none, and has ended.
    Ended(Option<BadRequest>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    UnderWay { user: u64, is_cancelled: bool },
}

#[derive(Debug)]
pub struct Consumer {
    layout: Layout,
    epoch: u64,
    /// Requests that were taken from the posted slots.
    taken: u64,
    /// And from each armed one.
    generations: Vec<u64>,
    slots: Vec<Slot>,
    /// The armed slot that is looked at first.
    first_armed: u16,
    completions: u64,
}

impl Ticket {
    pub fn slot(&self) -> u16 {
        self.slot
    }
}

impl Consumer {
    /// Of a ring that was just made.
    pub fn new(layout: Layout, header: &Header) -> Consumer {
        Consumer {
            layout,
            epoch: header.epoch(),
            taken: 0,
            generations: vec![0; layout.armed().into()],
            slots: vec![Slot::Free; layout.slots().into()],
            first_armed: 0,
            completions: 0,
        }
    }

    /// Requests that were taken and have not ended.
    pub fn under_way(&self) -> usize {
        self.slots.iter().filter(|slot| **slot != Slot::Free).count()
    }

    /// Takes the next request, if there is one.
    pub fn take(&mut self, ring: &[AtomicU64]) -> Result<Option<Taken>, Violation> {
        let Some(slot) = self.published(ring)? else { return Ok(None) };
        if slot < self.layout.posted() {
            self.taken += 1;
        } else {
            let armed = slot - self.layout.posted();
            self.generations[usize::from(armed)] += 1;
            self.first_armed = (armed + 1) % self.layout.armed();
        }
        Ok(Some(self.open(ring, slot)))
    }

    /// Whether something was published, if only nonsense.
    pub fn has_work(&self, ring: &[AtomicU64]) -> bool {
        !matches!(self.published(ring), Ok(None))
    }

    /// A request has ended, with this result for each of its contexts and so many bytes in all.
    /// [Wake](crate::sleep) the producer then.
    pub fn end(&mut self, ring: &[AtomicU64], ticket: Ticket, results: &[ContextResult], bytes: u64) {
        let Ticket { slot, user, echoes } = ticket;
        let done = results.iter().filter(|result| result.status == ContextStatus::Done).count();
        for ((result, echo), context) in results.iter().zip(echoes).zip(0..self.layout.contexts()) {
            let at = self.layout.result(slot, context);
            result.words(echo).iter().zip(&ring[at..]).for_each(|(value, word)| {
                word.store(*value, Ordering::Relaxed);
            });
        }
        let status = if done == results.len() { Status::Done } else { Status::Partial };
        self.complete(ring, Completion { user, slot, status, contexts_done: done as u32, bytes });
    }

    /// The same of one of which nothing can be done.
    pub fn refuse(&mut self, ring: &[AtomicU64], ticket: Ticket, status: Status) {
        let Ticket { slot, user, .. } = ticket;
        self.complete(ring, Completion { user, slot, status, contexts_done: 0, bytes: 0 });
    }

    /// Whether the producer has no use for it any more.
    pub fn is_cancelled(&self, ticket: &Ticket) -> bool {
        let slot = self.slots[usize::from(ticket.slot)];
        matches!(slot, Slot::UnderWay { is_cancelled: true, .. })
    }

    fn complete(&mut self, ring: &[AtomicU64], completion: Completion) {
        self.slots[usize::from(completion.slot)] = Slot::Free;
        let at = self.layout.completion(self.completions);
        completion.words().iter().zip(&ring[at..]).for_each(|(value, word)| {
            word.store(*value, Ordering::Relaxed);
        });
        self.completions += 1;
        ring[at + 3].store(self.completions, Ordering::Release);
    }

    /// The slot of the next request that is whole.
    fn published(&self, ring: &[AtomicU64]) -> Result<Option<u16>, Violation> {
        let posted = u64::from(self.layout.posted());
        let slot = (self.taken % posted) as u16;
        let expected = self.taken + 1;
        if self.is_published(ring, slot, expected.saturating_sub(posted), expected)? {
            return Ok(Some(slot));
        }
        let armed = self.layout.armed();
        if armed == 0 || Header::of(ring).armed() == 0 {
            return Ok(None);
        }
        for number in (self.first_armed..armed).chain(0..self.first_armed) {
            let before = self.generations[usize::from(number)];
            let slot = self.layout.posted() + number;
            if self.is_published(ring, slot, before, before + 1)? {
                return Ok(Some(slot));
            }
        }
        Ok(None)
    }

    fn is_published(
        &self,
        ring: &[AtomicU64],
        slot: u16,
        before: u64,
        expected: u64,
    ) -> Result<bool, Violation> {
        let word = ring[self.layout.request(slot) + 7].load(Ordering::Acquire);
        match word {
            word if word == before => Ok(false),
            word if word != expected => Err(Violation::Sequence { slot, word, before, expected }),
            _ if self.slots[usize::from(slot)] != Slot::Free => Err(Violation::Overrun { slot }),
            _ => Ok(true),
        }
    }

    /// Copies what a published slot says.
    fn open(&mut self, ring: &[AtomicU64], slot: u16) -> Taken {
        let at = self.layout.request(slot);
        let words: [u64; REQUEST_WORDS - 1] =
            std::array::from_fn(|word| ring[at + word].load(Ordering::Relaxed));
        let [user, _, epoch, ..] = words;
        let mut ticket = Ticket { slot, user, echoes: Vec::new() };
        let request = match Request::decode(words, self.layout.contexts()) {
            _ if epoch != self.epoch => {
                self.refuse(ring, ticket, Status::Stale);
                return Taken::Ended(None);
            }
            Ok(request) => request,
            Err(bad) => {
                self.refuse(ring, ticket, Status::Malformed);
                return Taken::Ended(Some(bad));
            }
        };
        let context = |context| {
            let at = self.layout.context(slot, context);
            Context::decode(std::array::from_fn(|word| ring[at + word].load(Ordering::Relaxed)))
        };
        let contexts: Result<Vec<Context>, BadRequest> = (0..request.contexts).map(context).collect();
        if let Ok(contexts) = &contexts {
            ticket.echoes = contexts.iter().map(|context| context.echo(user, request.lease)).collect();
        }
        match (contexts, request.op) {
            (Err(bad), _) => {
                self.refuse(ring, ticket, Status::Malformed);
                Taken::Ended(Some(bad))
            }
            (Ok(_), Op::Nop) => {
                self.end(ring, ticket, &[], 0);
                Taken::Ended(None)
            }
            (Ok(contexts), Op::Cancel) => self.cancel(ring, ticket, &request, &contexts),
            (Ok(contexts), Op::Read | Op::Commit) => {
                self.slots[usize::from(slot)] = Slot::UnderWay { user, is_cancelled: false };
                Taken::Work(Work { ticket, request, contexts })
            }
        }
    }

    /// The lease of a request that cancels is the other one's user, so that the next one in that
    /// slot is not meant.
    fn cancel(
        &mut self,
        ring: &[AtomicU64],
        ticket: Ticket,
        request: &Request,
        contexts: &[Context],
    ) -> Taken {
        let slot = contexts.first().and_then(|context| u16::try_from(context.extent).ok());
        let other = slot.and_then(|slot| self.slots.get_mut(usize::from(slot)).zip(Some(slot)));
        match other {
            Some((Slot::UnderWay { user, is_cancelled, .. }, slot)) if *user == request.lease => {
                *is_cancelled = true;
                self.end(ring, ticket, &[ContextResult::default()], 0);
                Taken::Cancelled { slot }
            }
            _ => {
                self.end(ring, ticket, &[ContextResult::failed(ContextStatus::Gone)], 0);
                Taken::Ended(None)
            }
        }
    }
}
