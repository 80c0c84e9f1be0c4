//! The locks of all crates: the standard library's without poison, since a panic under a lock
//! leaves what it guards as it is.
//!
//! They keep no state outside of themselves, so a child of `fork()` can use locks that it makes,
//! whatever the parent's threads did at the time. `parking_lot` keeps who waits in one table of the
//! process: a child inherits the parent's and loses wake-ups (decision 021).

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard};

#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

/// What is guarded, until this is dropped.
pub struct MutexGuard<'a, T: ?Sized>(
    /// Only away while a [`Condvar`] waits with it.
    Option<sync::MutexGuard<'a, T>>,
);

/// Whether a wait has ended because its time was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }

    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The lock, if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(MutexGuard(Some(guard))),
            Err(TryLockError::Poisoned(poisoned)) => Some(MutexGuard(Some(poisoned.into_inner()))),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Mutex<T> {
        Mutex::new(value)
    }
}

const AWAY: &str = "a guard is away only while its thread waits";

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(guard) => guard,
            None => unreachable!("{AWAY}"),
        }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.0 {
            Some(guard) => guard,
            None => unreachable!("{AWAY}"),
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl WaitTimeoutResult {
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits until it is notified, or for no reason at all.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.0 = guard.0.take().map(|guard| self.0.wait(guard).unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`wait`](Condvar::wait), for so long at most.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        let Some(held) = guard.0.take() else { unreachable!("{AWAY}") };
        let (held, result) = self.0.wait_timeout(held, limit).unwrap_or_else(PoisonError::into_inner);
        guard.0 = Some(held);
        WaitTimeoutResult(result.timed_out())
    }

    /// As [`wait`](Condvar::wait), until then at most.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        self.wait_for(guard, until.saturating_duration_since(Instant::now()))
    }

    /// Waits as long as it is so.
    pub fn wait_while<T>(&self, guard: &mut MutexGuard<'_, T>, mut is_so: impl FnMut(&mut T) -> bool) {
        while is_so(guard) {
            self.wait(guard);
        }
    }

    /// Waits as long as it is so, until then at most.
    pub fn wait_while_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut is_so: impl FnMut(&mut T) -> bool,
        until: Instant,
    ) -> WaitTimeoutResult {
        let mut timed_out = false;
        while is_so(guard) {
            if timed_out {
                return WaitTimeoutResult(true);
            }
            timed_out = self.wait_until(guard, until).timed_out();
        }
        WaitTimeoutResult(false)
    }

    /// Waits as long as it is so, for so long at most.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        is_so: impl FnMut(&mut T) -> bool,
        limit: Duration,
    ) -> WaitTimeoutResult {
        match Instant::now().checked_add(limit) {
            Some(until) => self.wait_while_until(guard, is_so, until),
            None => {
                self.wait_while(guard, is_so);
                WaitTimeoutResult(false)
            }
        }
    }
}

impl<T> RwLock<T> {
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if it can be read now.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        match self.0.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_panic_under_a_lock_leaves_what_it_guards_to_the_next() {
        let (mutex, shared) = (Arc::new(Mutex::new(1)), Arc::new(RwLock::new(1)));
        let (theirs, theirs_too) = (Arc::clone(&mutex), Arc::clone(&shared));
        let panics = move || {
            let (mut one, mut two) = (theirs.lock(), theirs_too.write());
            (*one, *two) = (2, 2);
            panic!("as the test wants it");
        };
        assert!(std::thread::spawn(panics).join().is_err());
        assert_eq!(*mutex.lock(), 2);
        assert_eq!(mutex.try_lock().map(|guard| *guard), Some(2));
        assert_eq!(*shared.read(), 2);
        assert_eq!(shared.try_read().map(|guard| *guard), Some(2));
    }

    #[test]
    fn a_wait_ends_when_it_is_no_longer_so_or_its_time_is_over() {
        let pair = Arc::new((Mutex::new(false), Condvar::new()));
        let mut guard = pair.0.lock();
        let short = Duration::from_millis(5);
        assert!(pair.1.wait_while_for(&mut guard, |is_set| !*is_set, short).timed_out());
        assert!(pair.1.wait_until(&mut guard, Instant::now()).timed_out());
        assert!(pair.0.try_lock().is_none());
        let theirs = Arc::clone(&pair);
        let thread = std::thread::spawn(move || {
            *theirs.0.lock() = true;
            theirs.1.notify_all();
        });
        assert!(!pair.1.wait_while_for(&mut guard, |is_set| !*is_set, Duration::MAX).timed_out());
        assert!(*guard);
        drop(guard);
        thread.join().unwrap();
    }
}
