//! What this node has for its peers: answers who has what, and lends chunks out of the arena under leases. This file knows
//! limits and what a loan keeps; it must never know how the bytes travel, or trust that whoever asks means well.
//!
//! A chunk on disk comes into memory before it is lent. As long as a lease lives its chunks lie still; after it has ended no
//! read of it ends well, whatever it has got by then.

use super::words::{Ask, LentChunk, Loans, TenantKey, Told};
use forebay_agent::{Identity, LeaseTable, LeasedSpan, PeerRegion, Reply, Service};
use forebay_kv::ChunkId;
use forebay_mover::{Class, MoverHandle};
use forebay_store::{Lease, Loan, NotBrought, Store, TenantId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// How long a chunk may take to come from disk to be lent.
const BRING_LIMIT_US: u64 = 2_000_000;
/// Bytes of checksums and places in an answer at most.
const ANSWER_BYTES_MAX: usize = 900 << 10;

/// The owner's end.
pub struct Owner {
    store: Store,
    mover: MoverHandle,
    token: Vec<u8>,
    /// Bytes that a peer may be lent at a time.
    lent_bytes_max: u64,
    /// What the agent that is asked has: known when it is there.
    ground: OnceLock<(LeaseTable, PeerRegion)>,
    lent: Arc<Mutex<HashMap<[u8; 16], u64>>>,
    stopped: AtomicBool,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    lends: AtomicU64,
    refused: AtomicU64,
}

/// Chunks that come together to be lent.
struct Gathering {
    owner: Arc<Owner>,
    from: Identity,
    ttl_us: u64,
    /// Keeps the chunks where they are until they are lent.
    _lease: Lease,
    state: Mutex<Gathered>,
}

struct Gathered {
    loans: Vec<Option<Loan>>,
    missing: usize,
    reply: Option<Reply>,
}

impl Owner {
    /// An owner that lends nothing before [`open`](Owner::open).
    pub fn new(store: Store, mover: MoverHandle, token: Vec<u8>, lent_bytes_max: u64) -> Owner {
        Owner {
            store,
            mover,
            token,
            lent_bytes_max,
            ground: OnceLock::new(),
            lent: Arc::default(),
            stopped: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    /// Lends out of this region from now on.
    pub fn open(&self, leases: LeaseTable, region: PeerRegion) {
        // Set once: there is one agent.
        let _ = self.ground.set((leases, region));
    }

    /// Lends nothing any more.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Chunks that were lent, and requests that were refused.
    pub fn counts(&self) -> (u64, u64) {
        (self.counts.lends.load(Ordering::Relaxed), self.counts.refused.load(Ordering::Relaxed))
    }

    fn lent(&self) -> MutexGuard<'_, HashMap<[u8; 16], u64>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse(&self, reply: Reply, why: String) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        reply.refuse(why);
    }

    fn tenant(&self, key: &TenantKey) -> Result<TenantId, String> {
        if TenantKey::of(&self.token, key.tenant) != *key {
            return Err(format!("the key is not that of {:?} here", key.tenant));
        }
        Ok(key.tenant)
    }

    fn lend(owner: Arc<Owner>, from: Identity, key: &TenantKey, ttl_us: u64, ids: &[ChunkId], reply: Reply) {
        let tenant = match owner.tenant(key) {
            Ok(_) if owner.stopped.load(Ordering::Acquire) => {
                return owner.refuse(reply, "shutting down".into());
            }
            Ok(tenant) => tenant,
            Err(why) => return owner.refuse(reply, why),
        };
        let lease = owner.store.lease(tenant, ids, ttl_us + BRING_LIMIT_US);
        let chunks = lease.len();
        if chunks == 0 {
            return owner.refuse(reply, "none of these chunks is here".into());
        }
        let loans = (0..chunks).map(|_| None).collect();
        // One more is missing until all were asked for, so that the end is told once.
        let state = Gathered { loans, missing: chunks + 1, reply: Some(reply) };
        let deadline_us = Some(owner.mover.now_us() + BRING_LIMIT_US);
        let store = owner.store.clone();
        let gathering = Arc::new(Gathering { owner, from, ttl_us, _lease: lease, state: Mutex::new(state) });
        for chunk in 0..chunks {
            let gathered = Arc::clone(&gathering);
            let on_end = move |loan: Result<Loan, NotBrought>| gathered.arrived(Some(chunk), loan.ok());
            store.bring(&gathering._lease, chunk, Class::Demand, deadline_us, on_end);
        }
        gathering.arrived(None, None);
    }
}

impl Gathering {
    fn arrived(&self, chunk: Option<usize>, loan: Option<Loan>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = chunk.and_then(|chunk| state.loans.get_mut(chunk)) {
            *place = loan;
        }
        state.missing -= 1;
        let reply = if state.missing == 0 { state.reply.take() } else { None };
        let Some(reply) = reply else { return };
        let loans: Vec<Loan> = std::mem::take(&mut state.loans).into_iter().map_while(|loan| loan).collect();
        drop(state);
        match self.grant(loans) {
            Ok(loans) => reply.send(Told::Lent(loans).encode()),
            Err(why) => self.owner.refuse(reply, why),
        }
    }

    /// Grants a lease of as many chunks as the peer may have.
    fn grant(&self, mut loans: Vec<Loan>) -> Result<Loans, String> {
        let owner = &self.owner;
        let (leases, region) = owner.ground.get().ok_or("not open yet")?;
        let instance = self.from.instance;
        let bytes = {
            let mut lent = owner.lent();
            let has = lent.entry(instance).or_default();
            let fitting = fitting(&loans, owner.lent_bytes_max.saturating_sub(*has));
            loans.truncate(fitting.0);
            *has += fitting.1;
            fitting.1
        };
        let told: Vec<LentChunk> = loans.iter().map(told).collect();
        let spans = loans.iter().map(|loan| span(*region, loan)).collect();
        let count = loans.len();
        let table = Arc::clone(&owner.lent);
        // Dropped also where there is no lease.
        let kept = Kept { loans, bytes, instance, table };
        if count == 0 {
            return Err("no chunk could be lent: not readable, or as much is lent as may be".into());
        }
        let granted = leases.grant(instance, spans, self.ttl_us, move |_| drop(kept));
        let lease = granted.map_err(|error| error.to_string())?;
        owner.counts.lends.fetch_add(count as u64, Ordering::Relaxed);
        let region = (region.key, region.generation, region.len);
        Ok(Loans { lease, region, chunks: told })
    }
}

/// What a lease keeps.
struct Kept {
    loans: Vec<Loan>,
    bytes: u64,
    instance: [u8; 16],
    table: Arc<Mutex<HashMap<[u8; 16], u64>>>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.loans.clear();
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lent) = table.get_mut(&self.instance) {
            *lent = lent.saturating_sub(self.bytes);
            if *lent == 0 {
                table.remove(&self.instance);
            }
        }
    }
}

/// How many of the loans, from the first on, fit into an answer and a number of bytes, and how many bytes they are.
fn fitting(loans: &[Loan], bytes_max: u64) -> (usize, u64) {
    let (mut count, mut bytes, mut answer) = (0, 0, 0);
    for loan in loans {
        let shape = loan.shape();
        // A run of its own for each layer, at worst.
        answer += 32 + 16 * shape.layers();
        if bytes + shape.bytes() > bytes_max || answer > ANSWER_BYTES_MAX {
            break;
        }
        (count, bytes) = (count + 1, bytes + shape.bytes());
    }
    (count, bytes)
}

fn told(loan: &Loan) -> LentChunk {
    let (shape, sums) = (loan.shape().clone(), loan.sums().to_vec());
    LentChunk { offset_bytes: loan.offset_bytes(), shape, sums }
}

fn span(region: PeerRegion, loan: &Loan) -> LeasedSpan {
    LeasedSpan { region, offset: loan.offset_bytes(), len: loan.shape().bytes() }
}

/// The owner as its agent's service.
pub struct Counter(pub Arc<Owner>);

impl Service for Counter {
    fn call(&self, from: Identity, body: Vec<u8>, reply: Reply) {
        let owner = &self.0;
        match Ask::decode(&body) {
            Ok(Ask::Has(key, ids)) => match owner.tenant(&key) {
                Ok(_) => reply.send(Told::Has(owner.store.lookup(&ids) as u32).encode()),
                Err(why) => owner.refuse(reply, why),
            },
            Ok(Ask::Lend(key, ttl_us, ids)) => {
                Owner::lend(Arc::clone(owner), from, &key, ttl_us, &ids, reply)
            }
            Ok(Ask::Return(lease)) => {
                if let Some((leases, _)) = owner.ground.get() {
                    // One that has ended is over as well.
                    leases.give_back(from.instance, lease);
                }
                reply.send(Told::Returned.encode());
            }
            Err(bad) => owner.refuse(reply, bad.to_string()),
        }
    }

    /// The agent ends the peer's leases, and with them its loans.
    fn gone(&self, _from: Identity) {}
}
