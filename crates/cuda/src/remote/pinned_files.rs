//! The host memory that a node pins for engines: each file once for all that bring it, in pieces,
//! so that no call of another process waits for more than one of them. The node's own arena is
//! known by its file and needs no second mapping.

use super::shared::SharedFile;
use crate::device::Device;
use crate::pinned::{PIECE_BYTES_MAX, PinnedBehind, Shareable};
use forebay_transfer::Backing;
use forebay_transfer::lock::Mutex;
use rustix::fs::fstat;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak, mpsc};

/// Device and inode.
type Identity = (u64, u64);

#[derive(Debug, Default)]
pub struct PinnedFiles {
    /// What engines brought. The last of them lets go of it.
    brought: Mutex<HashMap<Identity, Weak<PinnedBehind>>>,
    own: Option<Own>,
}

/// The node's own memory: pinned when the first engine brings it, and from then on for good.
struct Own {
    identity: Identity,
    memory: Arc<dyn Shareable>,
    pinned: Mutex<Option<Arc<PinnedBehind>>>,
}

impl PinnedFiles {
    /// With memory of the node's own, if it is a file.
    pub fn new(own: Option<Arc<dyn Shareable>>) -> PinnedFiles {
        let own = own.and_then(|memory| {
            let identity = identity(memory.file()?).ok()?;
            Some(Own { identity, memory, pinned: Mutex::default() })
        });
        PinnedFiles { brought: Mutex::default(), own }
    }

    /// A file's memory, all of it pinned when this returns. Of what is not the node's own,
    /// `most_bytes` at most.
    pub fn pin(
        &self,
        device: &Arc<Device>,
        file: OwnedFd,
        most_bytes: u64,
    ) -> Result<Arc<PinnedBehind>, String> {
        let identity = identity(file.as_fd())?;
        let memory = match self.own.as_ref().filter(|own| own.identity == identity) {
            Some(own) => own.pinned(device)?,
            None => self.brought(device, identity, file, most_bytes)?,
        };
        // Without the lock: others that bring memory wait for no more than theirs.
        wait_until_pinned(&memory)?;
        Ok(memory)
    }

    fn brought(
        &self,
        device: &Arc<Device>,
        identity: Identity,
        file: OwnedFd,
        most_bytes: u64,
    ) -> Result<Arc<PinnedBehind>, String> {
        let mut brought = self.brought.lock();
        brought.retain(|_, memory| memory.strong_count() > 0);
        if let Some(known) = brought.get(&identity).and_then(Weak::upgrade) {
            let fits = known.memory().len() as u64 <= most_bytes;
            return fits.then_some(known).ok_or_else(|| format!("{most_bytes} bytes more are allowed"));
        }
        let file = SharedFile::open(file, most_bytes).map_err(|error| error.to_string())?;
        let memory = begin(device, Arc::new(file))?;
        brought.insert(identity, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// How much of what an engine may bring a file takes.
    pub fn brought_bytes(&self, memory: &Arc<PinnedBehind>) -> u64 {
        let is_own = |own: &Own| own.pinned.lock().as_ref().is_some_and(|own| Arc::ptr_eq(own, memory));
        if self.own.as_ref().is_some_and(is_own) { 0 } else { memory.memory().len() as u64 }
    }
}

impl Own {
    fn pinned(&self, device: &Arc<Device>) -> Result<Arc<PinnedBehind>, String> {
        let mut pinned = self.pinned.lock();
        if let Some(pinned) = &*pinned {
            return Ok(Arc::clone(pinned));
        }
        let memory = begin(device, Arc::clone(&self.memory) as Arc<dyn Backing>)?;
        Ok(Arc::clone(pinned.insert(memory)))
    }
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Own").field("identity", &self.identity).finish_non_exhaustive()
    }
}

fn identity(file: impl AsFd) -> Result<Identity, String> {
    let stat = fstat(file).map_err(|error| error.to_string())?;
    Ok((stat.st_dev, stat.st_ino))
}

/// One thread: pieces that several pin at once take the driver's lock in turn all the same.
fn begin(device: &Arc<Device>, memory: Arc<dyn Backing>) -> Result<Arc<PinnedBehind>, String> {
    let pinned = PinnedBehind::start(device, memory, PIECE_BYTES_MAX, 1);
    pinned.map(Arc::new).map_err(|error| format!("a thread did not start: {error}"))
}

fn wait_until_pinned(memory: &PinnedBehind) -> Result<(), String> {
    let (sender, pinned) = mpsc::sync_channel(1);
    let all = std::iter::once((0, memory.memory().len() as u64));
    memory.when_pinned(all, Box::new(move |outcome| drop(sender.send(outcome))));
    pinned.recv().map_err(|_| "it was not pinned".to_owned())?
}

#[cfg(test)]
mod tests {
    use super::super::tests::driver;
    use super::*;
    use forebay_transfer::{Arena, Pages};
    use std::os::fd::BorrowedFd;

    #[test]
    fn what_engines_bring_is_pinned_in_pieces_once_for_all_and_the_nodes_arena_for_good() {
        let device = Device::open(driver(), 0).unwrap();
        let arena = Arc::new(Arena::new(1 << 20, Pages::Base).unwrap());
        let files = PinnedFiles::new(Some(Arc::clone(&arena) as Arc<dyn Shareable>));
        // Nobody touches it, so it takes no memory.
        let large = SharedFile::create(2 * PIECE_BYTES_MAX + 4096).unwrap();
        let pin = |file: BorrowedFd<'_>, most_bytes| {
            files.pin(&device, file.try_clone_to_owned().unwrap(), most_bytes)
        };
        let (one, other) = (pin(large.file(), 2 << 30).unwrap(), pin(large.file(), 2 << 30).unwrap());
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!((one.piece_bytes(), one.progress().0), (PIECE_BYTES_MAX, large.len() as u64));
        assert_eq!(files.brought_bytes(&one), large.len() as u64);
        assert!(pin(large.file(), 1 << 20).unwrap_err().contains("more are allowed"));
        let gone = Arc::downgrade(&one);
        drop((one, other));
        assert!(gone.upgrade().is_none(), "nobody else has it");
        // It does not count as what an engine brings.
        let own = Arc::downgrade(&pin(arena.as_fd(), 0).unwrap());
        let own = own.upgrade().unwrap();
        assert_eq!((own.memory().as_ptr(), files.brought_bytes(&own)), (arena.as_ptr(), 0));
        assert!(Arc::ptr_eq(&own, &pin(arena.as_fd(), 0).unwrap()));
    }
}
