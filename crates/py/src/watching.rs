//! What a node says of chunks that are watched, kept until somebody asks: an engine's scheduler
//! looks once in each step, and never waits. This file knows the order of what was said.

use forebay_client::{Client, Gone};
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Something that the node said.
pub enum Said {
    /// To the question of this number: these of its chunks are not there, and are not watched.
    Absent(u64, Vec<ChunkId>),
    /// These chunks have gone since, and are not watched any more.
    Gone(Vec<ChunkId>),
    /// The node has gone, and nothing is watched any more.
    All,
}

/// What was asked and said.
#[derive(Default)]
pub struct Watching {
    asked: AtomicU64,
    listens: AtomicBool,
    said: Arc<Mutex<Vec<Said>>>,
}

fn push(said: &Mutex<Vec<Said>>, one: Said) {
    said.lock().push(one);
}

impl Watching {
    /// Has the node watch chunks. Gives the number of the question, to which there will be one
    /// answer.
    pub fn ask(&self, client: &Client, ids: &[ChunkId]) -> u64 {
        if !self.listens.swap(true, Ordering::AcqRel) {
            let said = Arc::clone(&self.said);
            client.on_gone(move |gone| {
                push(&said, if let Gone::These(ids) = gone { Said::Gone(ids) } else { Said::All });
            });
        }
        let (number, said) = (self.asked.fetch_add(1, Ordering::Relaxed), Arc::clone(&self.said));
        client.watch_then(ids, move |absent| push(&said, Said::Absent(number, absent)));
        number
    }

    /// What the node has said since this was asked last, in its order.
    pub fn take(&self) -> Vec<Said> {
        std::mem::take(&mut self.said.lock())
    }
}
