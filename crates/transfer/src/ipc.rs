//! Memory of GPUs that processes of one host open of each other (inter-process communication, IPC).
//! Whoever knows GPUs does it, whoever speaks to peers asks for it, and neither knows the other.
//! Who may open what, and until when, is the business of whoever asks.

use crate::driver::LinkOp;
use crate::memory::Memory;
use crate::region::{Place, RegionId};

/// Called exactly once, on any thread, when nothing of a copy is under way any more. It is short.
pub type OnCopied = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Opens memory of GPUs in other processes of this host, and has them open that of this one.
pub trait Ipc: Send + Sync {
    /// What another process opens a registered region by, or why it cannot. Whoever has it can
    /// reach all of the allocation that the region lies in. May take milliseconds.
    fn export(&self, region: RegionId) -> Result<Vec<u8>, String>;

    /// Opens what a peer has exported, for copies by the GPU at `place`; they name it as `region`
    /// until the value is dropped. What the peer says is not trusted. May take milliseconds.
    fn open(&self, place: Place, exported: &[u8], region: RegionId) -> Result<Box<dyn Send + Sync>, String>;

    /// Has the GPU at `place` copy between memory of its own and what is open for it. Waits for
    /// nothing.
    fn copy(&self, place: Place, op: &LinkOp, memory: &Memory, on_copied: OnCopied);
}
