//! The prefiller's side: which pages are offered, who has opened which offer, and what has ended.
//! A lease is one of the agent's, which ends when its time is over, when its holder is gone, or
//! when it is given back. As many may open an offer as the first one says, each once: ranks of a
//! decoder that has more of them. With the last lease the offer ends. While the decoder copies, the
//! prefiller sums up what that wanted, and says the sums when the lease is given back. Whoever asks
//! is not trusted.

use super::memory::DirectMemory;
use super::message::{Answer, Blocks, Digest, Heads, Key, Opened, Question};
use super::plan;
use crate::errors::NotCopied;
use crate::page_tables::PageTables;
use crate::thread_pool::{TaskQueue, Urgency};
use forebay_net::{Identity, LeaseEnd, LeaseTable, Reply, Service};
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a lease lives that is not renewed. A reader that is frozen holds up a prefiller's
/// blocks for so long.
const LEASE: Duration = Duration::from_secs(5);
/// How long somebody who knows the key may be ahead of the engine's own word, ...
const EARLY: Duration = Duration::from_secs(2);
/// ... and who knows that the prompt is still computed, at most.
const EARLY_LIMIT: Duration = Duration::from_secs(120);
/// Who is ahead, at most.
const EARLY_MAX: usize = 256;
/// Who may open an offer, at most.
const READERS_MAX: u32 = 1024;

/// How an offer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OfferEnd {
    /// Whoever opened it is through, or said that it will not.
    Closed,
    /// Nobody opened it in time, or whoever did was silent for too long.
    Expired,
    /// Whoever opened it is gone.
    ReaderGone,
}

/// An offer that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfferEnded {
    pub key: Key,
    pub how: OfferEnd,
}

pub struct Offers {
    tasks: Arc<TaskQueue>,
    opened: OnceLock<(LeaseTable, Arc<dyn DirectMemory>)>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Default)]
struct Table {
    offers: HashMap<Key, Offer>,
    early: Vec<Early>,
    /// Keys under which nobody will read, though nothing is offered yet; the last ones only.
    declined: VecDeque<Key>,
    ended: Vec<OfferEnded>,
    /// How many sums are being taken of pages.
    summing: usize,
    closed: bool,
}

struct Offer {
    digest: Digest,
    tables: PageTables,
    /// How many may open it yet; who opens it first says how many do.
    left: Option<u32>,
    /// The checksums of each lease that lives.
    leased: HashMap<u64, Arc<Sums>>,
    /// Leases that are being granted or live.
    live: u32,
    /// How the worst of its leases has ended.
    worst: OfferEnd,
}

impl Offer {
    /// Nobody reads it now, and nobody will.
    fn is_over(&self) -> bool {
        self.live == 0 && self.left == Some(0)
    }
}

type Summed = Result<Vec<u64>, NotCopied>;
type ThenSummed = Box<dyn FnOnce(Summed) + Send>;

/// The checksums of what is leased, for whoever waits for them.
#[derive(Default)]
struct Sums(Mutex<(Option<Summed>, Option<ThenSummed>)>);

impl Sums {
    fn are(&self, summed: Summed) {
        let mut state = self.0.lock();
        match state.1.take() {
            None => state.0 = Some(summed),
            Some(then) => {
                drop(state);
                then(summed);
            }
        }
    }

    /// Does something with them when they are there. Who asks a second time is forgotten.
    fn then(&self, then: impl FnOnce(Summed) + Send + 'static) {
        let mut state = self.0.lock();
        match state.0.take() {
            None => state.1 = Some(Box::new(then)),
            Some(summed) => {
                drop(state);
                then(summed);
            }
        }
    }
}

/// Who asks for what.
struct Early {
    key: Key,
    digest: Digest,
    wanted: Blocks,
    heads: Heads,
    readers: u32,
    wait: Duration,
    from: Identity,
    reply: Reply,
}

impl State {
    /// Changes an offer, and ends it if it is over then.
    fn change(&self, key: Key, change: impl FnOnce(&mut Offer)) {
        let mut table = self.table.lock();
        let Some(offer) = table.offers.get_mut(&key) else { return };
        change(offer);
        if offer.is_over() {
            let how = offer.worst;
            table.offers.remove(&key);
            table.ended.push(OfferEnded { key, how });
            self.changed.notify_all();
        }
    }

    /// Nobody will open an offer, which may still be to come.
    fn decline(&self, key: Key) {
        let mut table = self.table.lock();
        if !table.offers.contains_key(&key) {
            table.declined.truncate(EARLY_MAX - 1);
            return table.declined.push_front(key);
        }
        drop(table);
        self.shut(key, OfferEnd::Closed);
    }

    /// Nobody may open an offer any more: it ends with the leases that live.
    fn shut(&self, key: Key, how: OfferEnd) {
        self.change(key, |offer| {
            if offer.left.replace(0) != Some(0) {
                offer.worst = offer.worst.max(how);
            }
        });
    }
}

impl Offers {
    pub fn new(tasks: &Arc<TaskQueue>) -> Offers {
        Offers { tasks: Arc::clone(tasks), opened: OnceLock::new(), state: Arc::default() }
    }

    /// Answers from now on.
    pub fn open(&self, leases: LeaseTable, memory: Arc<dyn DirectMemory>) {
        // Set once: there is one agent.
        let _ = self.opened.set((leases, memory));
    }

    pub fn offer(&self, key: Key, digest: Digest, tables: &PageTables, ttl: Duration) {
        let mut table = self.state.table.lock();
        if table.closed {
            return table.ended.push(OfferEnded { key, how: OfferEnd::Expired });
        }
        if let Some(at) = table.declined.iter().position(|declined| *declined == key) {
            table.declined.remove(at);
            return table.ended.push(OfferEnded { key, how: OfferEnd::Closed });
        }
        let (tables, leased) = (tables.clone(), HashMap::new());
        let offer = Offer { digest, tables, left: None, leased, live: 0, worst: OfferEnd::Closed };
        table.offers.insert(key, offer);
        let early: Vec<Early> = table.early.extract_if(.., |early| early.key == key).collect();
        drop(table);
        early.into_iter().for_each(|early| self.lease(early));
        let state = Arc::clone(&self.state);
        self.tasks.post_at(Instant::now() + ttl, move || state.shut(key, OfferEnd::Expired));
    }

    pub fn take_ended(&self) -> Vec<OfferEnded> {
        std::mem::take(&mut self.state.table.lock().ended)
    }

    /// Nothing is offered any more, now or later.
    pub fn close(&self) {
        self.state.table.lock().closed = true;
        self.withdraw();
    }

    /// Ends all offers. Waits until whoever reads is through, or its lease has ended.
    pub fn withdraw(&self) {
        let offered: Vec<Key> = self.state.table.lock().offers.keys().copied().collect();
        offered.into_iter().for_each(|key| self.state.shut(key, OfferEnd::Expired));
        let mut table = self.state.table.lock();
        table.early.clear();
        let is_read = |table: &mut Table| !table.offers.is_empty() || table.summing > 0;
        self.state.changed.wait_while_for(&mut table, is_read, 2 * LEASE);
    }

    /// Grants whoever asks a lease of an offer.
    fn lease(&self, early: Early) {
        let Some((leases, memory)) = self.opened.get() else { return early.reply.refuse("not ready".into()) };
        let (key, heads) = (early.key, early.heads);
        let (tables, pages) = match self.claim(&early) {
            Ok(claimed) => claimed,
            Err(why) => return early.reply.refuse(why),
        };
        let (state, sums) = (Arc::clone(&self.state), Arc::new(Sums::default()));
        let lease_of_end = Arc::new(OnceLock::new());
        let known = Arc::clone(&lease_of_end);
        let on_end = move |end: LeaseEnd| {
            let how = match end {
                LeaseEnd::Revoked => OfferEnd::Closed,
                LeaseEnd::Expired => OfferEnd::Expired,
                LeaseEnd::HolderGone => OfferEnd::ReaderGone,
            };
            state.change(key, |offer| {
                known.get().and_then(|lease| offer.leased.remove(lease));
                (offer.live, offer.worst) = (offer.live.saturating_sub(1), offer.worst.max(how));
            });
        };
        let ttl_us = LEASE.as_micros() as u64;
        match leases.grant(early.from.instance, memory.spans(&tables), ttl_us, on_end) {
            Ok(lease) => {
                // Set once, here.
                let _ = lease_of_end.set(lease);
                self.state.change(key, |offer| drop(offer.leased.insert(lease, Arc::clone(&sums))));
                let (tables, memory) = (tables.to_lists(), memory.memory().clone());
                early.reply.send(Answer::Opened(Opened { lease, ttl_us, tables, memory }).encode());
                self.sum(pages, heads, sums);
            }
            Err(why) => {
                self.state.change(key, |offer| offer.live = offer.live.saturating_sub(1));
                early.reply.refuse(why.to_string());
            }
        }
    }

    /// Has somebody open an offer: the offer's pages, and those of them that are wanted.
    fn claim(&self, early: &Early) -> Result<(PageTables, Vec<Vec<u64>>), String> {
        let mut table = self.state.table.lock();
        let offer = table.offers.get_mut(&early.key).ok_or("nothing is offered under this key")?;
        if offer.digest != early.digest {
            return Err("it is another prompt's".into());
        }
        let pages = plan::pages_of(&early.wanted, &offer.tables).map_err(|misfit| misfit.to_string())?;
        let left = offer.left.unwrap_or(early.readers.clamp(1, READERS_MAX));
        offer.left = Some(left.checked_sub(1).ok_or("as many read it already as were to")?);
        offer.live += 1;
        Ok((offer.tables.clone(), pages))
    }

    /// Sums pages up, beside the decoder's copy.
    fn sum(&self, pages: Vec<Vec<u64>>, heads: Heads, sums: Arc<Sums>) {
        let Some((_, memory)) = self.opened.get() else { return };
        let (state, memory) = (Arc::clone(&self.state), Arc::clone(memory));
        state.table.lock().summing += 1;
        self.tasks.post(Urgency::Load, move || {
            let on_summed = move |summed| {
                sums.are(summed);
                state.table.lock().summing -= 1;
                state.changed.notify_all();
            };
            memory.sum(&pages, heads, Box::new(on_summed));
        });
    }

    /// Takes a lease back when the sums of what it was for are there.
    fn take_back(&self, key: Key, lease: u64, from: Identity, reply: Reply) {
        let Some((leases, _)) = self.opened.get() else { return reply.refuse("not ready".into()) };
        let leases = leases.clone();
        let close = move |summed: Summed| {
            let lived = leases.give_back(from.instance, lease);
            match summed {
                Ok(sums) => reply.send(Answer::Closed { lived, sums }.encode()),
                Err(why) => reply.refuse(format!("its checksums: {why}")),
            }
        };
        let table = self.state.table.lock();
        let sums = table.offers.get(&key).and_then(|offer| offer.leased.get(&lease)).cloned();
        drop(table);
        match sums {
            Some(sums) => sums.then(close),
            None => close(Ok(Vec::new())),
        }
    }

    /// Somebody asks for an offer that is not there: the engine may be about to make it.
    fn wait(&self, early: Early) {
        let (key, wait) = (early.key, early.wait.clamp(EARLY, EARLY_LIMIT));
        let mut table = self.state.table.lock();
        if table.closed || table.early.len() >= EARLY_MAX {
            return early.reply.refuse("nothing is offered under this key".into());
        }
        table.early.push(early);
        drop(table);
        let state = Arc::clone(&self.state);
        self.tasks.post_at(Instant::now() + wait, move || {
            let late = state.table.lock().early.extract_if(.., |early| early.key == key).next();
            if let Some(late) = late {
                late.reply.refuse("nothing was offered under this key".into());
            }
        });
    }
}

impl Service for Offers {
    fn call(&self, from: Identity, body: Vec<u8>, reply: Reply) {
        let Some((leases, _)) = self.opened.get() else { return reply.refuse("not ready".into()) };
        let lives = |lives| Answer::Lives(lives).encode();
        match Question::decode(&body) {
            Ok(Question::Open { key, digest, wanted, heads, readers, wait_us }) => {
                let wait = Duration::from_micros(wait_us);
                let early = Early { key, digest, wanted, heads, readers, wait, from, reply };
                let is_there = self.state.table.lock().offers.contains_key(&key);
                if is_there { self.lease(early) } else { self.wait(early) }
            }
            Ok(Question::Renew { lease }) => {
                let renewed = leases.renew(from.instance, lease, LEASE.as_micros() as u64);
                reply.send(lives(renewed.is_ok()));
            }
            Ok(Question::Close { key, lease }) => self.take_back(key, lease, from, reply),
            Ok(Question::Decline { key }) => {
                self.state.decline(key);
                reply.send(lives(false));
            }
            Err(bad) => reply.refuse(format!("no question about an offer: {bad}")),
        }
    }

    /// The agent's leases end by themselves.
    fn gone(&self, _from: Identity) {}
}

impl std::fmt::Debug for Offers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = self.state.table.lock();
        f.debug_struct("Offers").field("open", &table.offers.len()).finish_non_exhaustive()
    }
}
