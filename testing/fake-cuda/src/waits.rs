//! Values in memory that streams write and wait for.
//!
//! A value may come from a stream, the host or another process, so somebody has to look: one
//! thread, and only while a stream waits.

use crate::clock::Clock;
use crate::driver::{State, lock, signals};
use crate::op::{Wanted, What};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// How often a value is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(50);

impl State {
    /// A stream writes a value.
    pub fn write_value(&mut self, id: u64, at: u64, bytes: u64, value: u64) {
        let raw = self.memory.raw(at);
        // SAFETY: enqueueing has checked that an area has these aligned bytes; it stays while an
        // operation waits.
        unsafe {
            if bytes == 4 {
                AtomicU32::from_ptr(raw as *mut u32).store(value as u32, Ordering::Release);
            } else {
                AtomicU64::from_ptr(raw as *mut u64).store(value, Ordering::Release);
            }
        }
        let Some(op) = self.ops.get(&id) else { return };
        self.order.wrote_value(at, &op.clock);
        if self.memory.find(at).is_some_and(|area| !area.kind.on_device()) {
            // The host may see it and go on from there.
            let clock = op.clock.clone();
            self.order.host.join(&clock);
        }
        if !self.waiting.is_empty() {
            signals().waiting.notify_all();
        }
    }

    /// A stream waits for a value; says whether it is there.
    pub fn begin_wait(&mut self, id: u64, wanted: Wanted) -> bool {
        if self.is_there(id, wanted) {
            return true;
        }
        self.waiting.push(id);
        static LOOKING: Once = Once::new();
        LOOKING.call_once(|| drop(std::thread::spawn(look)));
        signals().waiting.notify_all();
        false
    }

    fn is_there(&mut self, id: u64, wanted: Wanted) -> bool {
        let raw = self.memory.raw(wanted.at);
        // SAFETY: enqueueing has checked that an area has these aligned bytes; it stays while an
        // operation waits.
        let found = unsafe {
            match wanted.bytes {
                4 => AtomicU32::from_ptr(raw as *mut u32).load(Ordering::Acquire).into(),
                _ => AtomicU64::from_ptr(raw as *mut u64).load(Ordering::Acquire),
            }
        };
        if !wanted.is(found) {
            return false;
        }
        let before = self.order.value(wanted.at).cloned().unwrap_or_else(|| self.everything());
        if let Some(op) = self.ops.get_mut(&id) {
            op.clock.join(&before);
        }
        true
    }

    /// All that has ended: what may lie before a value that someone else wrote.
    fn everything(&self) -> Clock {
        let mut all = self.order.host.clone();
        self.streams.values().for_each(|stream| all.join(&stream.clock));
        all
    }

    fn look_once(&mut self) {
        for id in std::mem::take(&mut self.waiting) {
            let Some(op) = self.ops.get(&id) else { continue };
            let poisoned = self.gpus[op.gpu].poison.is_some();
            let What::Wait(wanted) = op.what else { continue };
            if poisoned || self.is_there(id, wanted) {
                self.finish(id);
            } else {
                self.waiting.push(id);
            }
        }
    }
}

fn look() {
    let mut state = lock();
    loop {
        state.look_once();
        if state.waiting.is_empty() {
            state.wait(&signals().waiting);
        } else {
            state.wait_for(&signals().waiting, LOOK_EVERY);
        }
    }
}
