//! How a call enters the driver.

use crate::abi::{Code, Outcome, STREAM_LEGACY, STREAM_PER_THREAD};
use crate::driver::{Locked, forked, lock, signals};
use crate::op::What;
use crate::stream::{Sort, Stream, this_thread};
use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};

/// How many calls the calling thread has made.
pub fn calls_of_thread() -> u64 {
    CALLS.get()
}

/// An entry point, for those who ask by name.
pub struct Entry {
    /// As exported: `cuMemcpyHtoDAsync_v2_ptsz`.
    pub symbol: &'static str,
    /// As cuGetProcAddress knows it: `cuMemcpyHtoDAsync`.
    pub name: &'static str,
    /// The CUDA version that brought it.
    pub since: i32,
    /// Whether stream 0 is the thread's own.
    pub per_thread: bool,
    pub address: *const (),
}

/// Declares entry points:
/// `SYMBOL | TWIN @ ITS_VERSION = "NAME" @ VERSION (arguments) |call| { body }`. A twin does the
/// same for the per-thread default stream.
macro_rules! entries {
    ($($symbol:ident $(| $twin:ident @ $twin_since:literal)? = $name:literal @ $since:literal $args:tt |$call:ident| $body:block)*) => {
        $(
            $crate::entry::entries!(@one $symbol false $args $call $body);
            $($crate::entry::entries!(@one $twin true $args $call $body);)?
        )*
        /// The entry points of this file.
        pub const ENTRIES: &[$crate::entry::Entry] = &[
            $($crate::entry::Entry {
                symbol: stringify!($symbol), name: $name, since: $since, per_thread: false, address: $symbol as *const (),
            }, $($crate::entry::Entry {
                symbol: stringify!($twin), name: $name, since: $twin_since, per_thread: true, address: $twin as *const (),
            },)?)*
        ];
    };
    (@one $symbol:ident $per_thread:literal ($($arg:ident: $kind:ty),* $(,)?) $call:ident $body:block) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol($($arg: $kind),*) -> i32 {
            $crate::entry::enter(stringify!($symbol), $per_thread, move |$call| $body)
        }
    };
}
pub(crate) use entries;

thread_local! {
    /// Calls of this thread.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// GPUs whose contexts are current, the last one on top.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's stack of contexts.
pub fn contexts<T>(what: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CONTEXTS.with(|contexts| what(&mut contexts.borrow_mut()))
}

/// A call that is being served.
pub struct Call {
    state: Locked,
    /// Whether stream 0 is the thread's own.
    pub per_thread: bool,
    pub symbol: &'static str,
}

impl Deref for Call {
    type Target = Locked;
    fn deref(&self) -> &Locked {
        &self.state
    }
}

impl DerefMut for Call {
    fn deref_mut(&mut self) -> &mut Locked {
        &mut self.state
    }
}

/// Serves a call: counts it, fails it or holds it up if that is asked for, and gives it the locked
/// state.
pub fn enter(symbol: &'static str, per_thread: bool, body: impl FnOnce(&mut Call) -> Outcome) -> i32 {
    if forked() {
        return Code::NOT_INITIALIZED.0;
    }
    CALLS.set(CALLS.get() + 1);
    let mut call = Call { state: lock(), per_thread, symbol };
    call.stats.called(symbol);
    call.calling = symbol;
    if let Some(code) = call.faults.strike(symbol) {
        return code.0;
    }
    while call.faults.is_stalled(symbol) {
        call.wait_for_any();
    }
    body(&mut call).err().unwrap_or(Code::SUCCESS).0
}

impl Call {
    /// The GPU whose context is current, if no error sticks to it.
    pub fn current(&self) -> Outcome<usize> {
        self.ready()?;
        let gpu = contexts(|contexts| contexts.last().copied()).ok_or(Code::INVALID_CONTEXT)?;
        self.healthy(gpu)?;
        Ok(gpu)
    }

    /// The error that sticks to a context.
    pub fn healthy(&self, gpu: usize) -> Outcome {
        self.gpus[gpu].poison.map_or(Ok(()), Err)
    }

    /// The stream that the caller means.
    pub fn stream(&mut self, given: usize) -> Outcome<usize> {
        let (gpu, own) = (self.current()?, self.per_thread.then(this_thread));
        let stream = match given {
            0 => self.default_stream(gpu, own),
            STREAM_LEGACY => self.default_stream(gpu, None),
            STREAM_PER_THREAD => self.default_stream(gpu, Some(this_thread())),
            handle if self.streams.get(&handle).is_some_and(|stream| stream.explicit) => handle,
            _ => {
                self.misused("a stream that does not exist");
                return Err(Code::INVALID_HANDLE);
            }
        };
        // Whichever context is current: that of the stream decides what it takes.
        self.streams.get(&stream).map_or(Ok(()), |found| self.healthy(found.gpu))?;
        Ok(stream)
    }

    /// A GPU's legacy stream, or a thread's own stream there.
    fn default_stream(&mut self, gpu: usize, thread: Option<usize>) -> usize {
        if let Some(&handle) = self.default_streams.get(&(gpu, thread)) {
            return handle;
        }
        let sort = if thread.is_some() { Sort::Blocking } else { Sort::Legacy };
        let handle = self.new_handle();
        self.streams.insert(handle, Stream::new(gpu, sort, false));
        self.default_streams.insert((gpu, thread), handle);
        handle
    }

    /// Sleeps until some operation has ended.
    pub fn wait_for_any(&mut self) {
        self.state.wait(&signals().done);
        // Others have called meanwhile.
        self.calling = self.symbol;
    }

    /// Puts an operation at a stream's end under the symbol's name.
    pub fn enqueue_named(&mut self, stream: usize, what: What) -> Outcome<Option<u64>> {
        let symbol = self.symbol;
        self.enqueue(stream, symbol, what)
    }

    /// Waits until operations have ended. The host knows then what lies before.
    pub fn wait_for_ops(&mut self, ops: impl IntoIterator<Item = u64>) -> Outcome {
        let found = |id: u64| self.ops.get(&id).map(|op| (id, op.gpu, op.stream, op.number));
        let waited_for: Vec<_> = ops.into_iter().filter_map(found).collect();
        for (id, gpu, stream, number) in waited_for {
            while self.ops.contains_key(&id) {
                self.wait_for_any();
            }
            if let Some(clock) = self.streams.get(&stream).map(|stream| stream.clock.clone()) {
                self.order.host.join(&clock);
            }
            self.order.host.reach(stream, number);
            self.healthy(gpu)?;
        }
        Ok(())
    }

    /// Waits for all that a stream has been given. The legacy stream stands for all that block with
    /// it.
    pub fn wait_for_stream(&mut self, stream: usize) -> Outcome {
        self.not_capturing(stream)?;
        for stream in self.waited_for_with(stream) {
            let Some(found) = self.streams.get(&stream) else { continue };
            let (gpu, last, clock) = (found.gpu, found.last, found.clock.clone());
            self.order.host.join(&clock);
            self.wait_for_ops([last])?;
            self.healthy(gpu)?;
        }
        Ok(())
    }
}
