//! A client that is let in, as the whole node sees it: what it is called, what it holds, what it
//! watches, and the answers on their way to it. Its session takes its requests.

use super::answer_queue::AnswerQueue;
use super::leases::ClientLeases;
use super::ring::Ring;
use super::watch_list::WatchList;
use crate::config::LimitsConfig;
use forebay_client::protocol::answer::Answer;
use forebay_client::protocol::frame::UNASKED;
use forebay_client::protocol::request::IDS_MAX;
use forebay_kv::ChunkId;
use forebay_store::{Left, TenantId};
use forebay_transfer::lock::{Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug)]
pub struct Client {
    pub name: String,
    pub tenant: TenantId,
    pub answers: AnswerQueue,
    leases: Mutex<ClientLeases>,
    watches: AtomicBool,
    watched: Mutex<WatchList>,
    ring: Mutex<Option<Ring>>,
}

impl Client {
    pub fn new(socket: OwnedFd, tenant: TenantId, name: String, limits: &LimitsConfig) -> io::Result<Client> {
        Ok(Client {
            name,
            tenant,
            answers: AnswerQueue::new(socket)?,
            leases: Mutex::new(ClientLeases::new(limits)),
            watches: AtomicBool::new(false),
            watched: Mutex::default(),
            ring: Mutex::default(),
        })
    }

    /// A panic under the lock leaves what the client holds; it is freed with the rest.
    pub fn leases(&self) -> MutexGuard<'_, ClientLeases> {
        self.leases.lock()
    }

    pub fn has_ring(&self) -> bool {
        self.ring.lock().is_some()
    }

    /// It posts its requests there from now on.
    pub fn keep_ring(&self, ring: Ring) {
        *self.ring.lock() = Some(ring);
    }

    /// Takes nothing from its ring any more.
    pub fn stop_ring(&self) {
        let ring = self.ring.lock().take();
        if let Some(ring) = ring {
            ring.stop();
        }
    }

    pub fn watches(&self) -> bool {
        self.watches.load(Ordering::Acquire)
    }

    /// From now on [`tell_left`](Client::tell_left) is to be called.
    pub fn begin_to_watch(&self) {
        self.watches.store(true, Ordering::Release);
    }

    /// Has `answer` called with those chunks that are not there or not watched, before the next
    /// chunk is said to be gone: the client takes both in order.
    pub fn watch(
        &self,
        ids: &[ChunkId],
        is_here: impl Fn(&ChunkId) -> bool,
        answer: impl FnOnce(Vec<ChunkId>),
    ) {
        let mut watched = self.watched.lock();
        answer(watched.watch(ids, is_here));
    }

    /// Chunks may have gone; on the store's thread.
    pub fn tell_left(&self, left: Left<'_>, is_here: impl Fn(&ChunkId) -> bool) {
        let mut watched = self.watched.lock();
        let gone = watched.take_gone(left, is_here);
        for part in gone.chunks(IDS_MAX) {
            self.answers.put(&Answer::Gone(part.to_vec()).encode(UNASKED));
        }
    }

    pub fn unwatch(&self) {
        self.watches.store(false, Ordering::Release);
        self.watched.lock().clear();
    }
}
