//! Memory of this process that other processes may map too, and pin. Whoever makes such memory says
//! so here, and whoever hands it to other processes is told when there is more or less of it.

use forebay_transfer::lock::{Mutex, MutexGuard};
use forebay_transfer::{Arena, Backing};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

/// Memory that may be a whole file, from its first byte to its last.
pub trait Shareable: Backing {
    /// The file, sealed against being shortened. `None` where it is this process's alone.
    fn file(&self) -> Option<BorrowedFd<'_>>;
}

impl Shareable for Arena {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// Called when something was published or withdrawn. It must be short.
pub type OnChange = dyn Fn() + Send + Sync;

/// Memory that is published until this is dropped. Who handed it on may keep it for a while longer.
#[derive(Debug)]
pub struct Published {
    number: u64,
}

struct Board {
    next: u64,
    memories: BTreeMap<u64, Arc<dyn Shareable>>,
    readers: Vec<Weak<OnChange>>,
}

static BOARD: Mutex<Board> = Mutex::new(Board { next: 0, memories: BTreeMap::new(), readers: Vec::new() });

/// Publishes memory, unless it is this process's alone. Whoever copies there sees to it that it is
/// pinned in this process, too.
pub fn publish(memory: Arc<dyn Shareable>) -> Option<Published> {
    memory.file()?;
    let mut board = lock();
    let number = board.next;
    board.next += 1;
    board.memories.insert(number, memory);
    tell(board);
    Some(Published { number })
}

/// What is published, by a number that is never used again.
pub fn published() -> BTreeMap<u64, Arc<dyn Shareable>> {
    lock().memories.clone()
}

/// Has a reader called at every change, for as long as it lives.
pub fn on_change(reader: &Arc<OnChange>) {
    lock().readers.push(Arc::downgrade(reader));
}

impl Drop for Published {
    fn drop(&mut self) {
        let mut board = lock();
        // Dropped after the lock: it may be the last that keeps the memory.
        let _memory = board.memories.remove(&self.number);
        tell(board);
    }
}

fn tell(mut board: MutexGuard<'_, Board>) {
    board.readers.retain(|reader| reader.strong_count() > 0);
    let readers: Vec<_> = board.readers.iter().filter_map(Weak::upgrade).collect();
    drop(board);
    readers.iter().for_each(|reader| reader());
}

fn lock() -> MutexGuard<'static, Board> {
    BOARD.lock()
}
