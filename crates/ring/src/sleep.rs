//! How one end of a ring sleeps without missing what the other end writes. Both ends announce what
//! they do before they look at what the other one has done, so that one of them sees it.

use crate::atomics::{AtomicU64, Ordering, fence};

/// Announces sleep. `false`: there is something to do, so the caller goes on; otherwise it waits
/// until the word is 0 again.
pub fn fall_asleep(word: &AtomicU64, has_work: impl FnOnce() -> bool) -> bool {
    word.store(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if has_work() {
        word.store(0, Ordering::SeqCst);
        return false;
    }
    true
}

/// To be called behind what the other end waits for. `true`: it sleeps, and has to be woken up.
pub fn is_to_be_woken(word: &AtomicU64) -> bool {
    fence(Ordering::SeqCst);
    word.load(Ordering::SeqCst) != 0 && word.swap(0, Ordering::SeqCst) != 0
}
