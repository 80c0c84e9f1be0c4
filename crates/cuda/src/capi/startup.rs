//! What the preload's copies are made with: it starts in the background with the first copy that
//! could go over several links, and anew after a context was reset.

use crate::copier::{StartError, start_stream_copies};
use crate::driver::Driver;
use crate::driver::abi::DeviceId;
use crate::rates::Rates;
use crate::stream_copy::StreamCopies;
use forebay_transfer::lock::{RwLock, RwLockReadGuard};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a reset looks whether the start is over.
const LOOK: Duration = Duration::from_millis(1);

/// What copies are made with.
#[derive(Debug)]
pub enum Startup {
    Not,
    /// These. Never dropped at the end of the process: the driver may be gone by then.
    With(Box<StreamCopies>),
    /// Nothing, ever: why is on stderr.
    Failed,
}

static STARTUP: RwLock<Startup> = RwLock::new(Startup::Not);
/// A thread is at it.
static STARTING: AtomicBool = AtomicBool::new(false);

/// What there is; `None` while it changes.
pub fn startup() -> Option<RwLockReadGuard<'static, Startup>> {
    if STARTING.load(Ordering::Acquire) {
        return None;
    }
    STARTUP.try_read()
}

fn set(startup: Startup) {
    *STARTUP.write() = startup;
}

/// Starts on a thread of its own, unless one is at it. `ready` is told the rates.
pub fn start_in_background(driver: &'static Driver, ready: fn(&Rates)) {
    if STARTING.swap(true, Ordering::AcqRel) {
        return;
    }
    let start = move || {
        let stream_copies = catch_unwind(AssertUnwindSafe(|| start_stream_copies(driver, None)));
        let startup = match stream_copies {
            Ok(Ok(stream_copies)) => {
                ready(stream_copies.rates());
                Startup::With(Box::new(stream_copies))
            }
            Ok(Err(error)) => failed(&error),
            // The panic's message is on stderr.
            Err(_) => Startup::Failed,
        };
        set(startup);
        STARTING.store(false, Ordering::Release);
    };
    let thread = std::thread::Builder::new().name("forebay-start".into());
    if let Err(error) = thread.spawn(start) {
        set(failed(&StartError::Thread(error)));
        STARTING.store(false, Ordering::Release);
    }
}

fn failed(error: &StartError) -> Startup {
    tracing::warn!(reason = %error, "copies are left to the driver");
    Startup::Failed
}

/// The context of a GPU is about to be reset: nothing that it has is used or given back any more.
/// What there is of other GPUs is given back behind the program's back, since that waits for what
/// they have under way.
pub fn forget(device: DeviceId) {
    while STARTING.load(Ordering::Acquire) {
        std::thread::sleep(LOOK);
    }
    let mut startup = STARTUP.write();
    let Startup::With(stream_copies) = &*startup else { return };
    let Some(gone) = stream_copies.devices().iter().find(|known| known.id == device) else { return };
    gone.is_reset();
    let left = std::mem::replace(&mut *startup, Startup::Not);
    let thread = std::thread::Builder::new().name("forebay-end".into());
    // Without a thread it is given back here.
    let _ = thread.spawn(move || drop(left));
}
