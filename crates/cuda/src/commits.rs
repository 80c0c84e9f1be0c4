//! Requests of a ring that a GPU publishes: those that make slots of the node's arena visible. A
//! kernel joins the checksums of what the slots hold and writes them behind the copies, so that no
//! thread of the host has to wait for these. This file knows words and where they lie; what a
//! request says, and that its slot of the ring is armed, is the caller's.

use crate::checksum::{Places, SumList};
use crate::device::{Device, HostMemory, Stream};
use crate::driver::CudaError;
use crate::driver::abi::Address;
use crate::kernels::Kernel;
use forebay_transfer::lock::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// Source and build script are in the folder `kernels`.
const PTX: &str = concat!(include_str!("../kernels/commits.ptx"), "\0");
/// A block takes a request at a time, and each of its threads a layer.
const BLOCKS_MAX: u32 = 64;
const THREADS: u32 = 256;
/// Requests of a list at most.
const COMMITS_MAX: usize = 1024;

/// An armed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// Where the ring has the contexts of its slot, as the GPU reaches it.
    pub contexts: Address,
    /// Where the ring has the slot's sequence word.
    pub word: Address,
    /// What publishes the request there.
    pub value: u64,
    /// The layers of the slot that is committed: extents of the list of sums.
    pub layers: Range<usize>,
}

/// The same as the kernel has it. The layout is the kernel's.
#[repr(C)]
struct Entry {
    contexts: Address,
    word: Address,
    value: u64,
    ranges: Address,
    remainders: Address,
    starts: Address,
    layers: u64,
}

/// The kernel, loaded for one device, and memory for its lists.
#[derive(Debug)]
pub struct Commits {
    kernel: Kernel,
    spare: Mutex<Vec<HostMemory>>,
}

/// What the kernel reads until the stream has come past it.
#[derive(Debug)]
pub struct CommitList {
    commits: Arc<Commits>,
    /// Taken when this is dropped.
    memory: Option<HostMemory>,
    count: u32,
    _sums: Arc<SumList>,
}

impl Commits {
    pub fn load(device: &Arc<Device>) -> Result<Arc<Commits>, CudaError> {
        let kernel = Kernel::load(device, PTX, c"forebay_commits")?;
        Ok(Arc::new(Commits { kernel, spare: Mutex::default() }))
    }

    /// Lists commits of slots that hold extents of these sums: 1,024 at most.
    ///
    /// # Panics
    ///
    /// If there is no such extent.
    pub fn list(self: &Arc<Self>, sums: &Arc<SumList>, all: &[Commit]) -> Result<CommitList, CudaError> {
        if all.len() > COMMITS_MAX {
            return Err(CudaError::full("list of commits"));
        }
        let spare = self.spare.lock().pop();
        let memory = match spare {
            Some(memory) => memory,
            None => HostMemory::new(self.kernel.device(), COMMITS_MAX * size_of::<Entry>())?,
        };
        let Places { start, remainders, starts } = sums.places();
        for (number, Commit { contexts, word, value, layers }) in all.iter().enumerate() {
            let (first, end, extents) = (layers.start, layers.end, sums.extents());
            assert!(first <= end && end <= extents, "extents {layers:?} of {extents}");
            let entry = Entry {
                contexts: *contexts,
                word: *word,
                value: *value,
                ranges: start as Address,
                remainders: remainders as Address,
                starts: starts.wrapping_add(first) as Address,
                layers: layers.len() as u64,
            };
            // SAFETY: there is room for as many, and no kernel has the memory.
            unsafe { memory.start().cast::<Entry>().add(number).write(entry) };
        }
        let (commits, memory, count) = (Arc::clone(self), Some(memory), all.len() as u32);
        Ok(CommitList { commits, memory, count, _sums: Arc::clone(sums) })
    }
}

impl CommitList {
    /// Has a stream write the contexts and publish the requests, behind the sums of their extents.
    ///
    /// # Safety
    ///
    /// The stream has the sums in front of it. Until it has come past this, the list lives and the
    /// ring stays mapped and pinned; the requests are armed, each is published here once, and their
    /// slots have as many contexts as the extents.
    pub unsafe fn queue(&self, stream: &Stream) -> Result<(), CudaError> {
        let kernel = &self.commits.kernel;
        let _current = kernel.device().enter()?;
        let start = self.memory.as_ref().map_or(std::ptr::null_mut(), HostMemory::start);
        let (mut list, mut count) = (start as Address, self.count);
        let mut parameters = [(&raw mut list).cast(), (&raw mut count).cast()];
        let blocks = (self.count.clamp(1, BLOCKS_MAX), 1);
        // SAFETY: the parameters have the types of the kernel's; the rest is this function's
        // contract.
        unsafe { kernel.launch(stream, blocks, THREADS, &mut parameters) }
    }
}

impl Drop for CommitList {
    fn drop(&mut self) {
        self.commits.spare.lock().extend(self.memory.take());
    }
}
