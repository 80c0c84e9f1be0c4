//! Functions of the program that streams call.

use crate::abi::{HostFn, StreamCallback};
use crate::driver::{State, lock, signals};
use crate::queue::What;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Once;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is inside of a function that a stream called.
pub fn inside() -> bool {
    INSIDE.get()
}

#[derive(Clone, Copy)]
enum Function {
    Host(HostFn),
    /// With the stream's handle as the program gave it.
    Callback(StreamCallback, usize),
}

/// A function and its argument.
#[derive(Clone, Copy)]
pub struct HostCall {
    function: Function,
    data: usize,
}

impl HostCall {
    pub fn host(function: HostFn, data: *mut c_void) -> HostCall {
        HostCall { function: Function::Host(function), data: data as usize }
    }

    pub fn callback(function: StreamCallback, stream: usize, data: *mut c_void) -> HostCall {
        HostCall { function: Function::Callback(function, stream), data: data as usize }
    }

    fn call(self) {
        INSIDE.set(true);
        // SAFETY: the program gave function and argument to be called once, on any thread.
        unsafe {
            match self.function {
                Function::Host(function) => function(self.data as *mut c_void),
                Function::Callback(function, stream) => function(stream, 0, self.data as *mut c_void),
            }
        }
        INSIDE.set(false);
    }
}

impl State {
    /// A stream calls a function.
    pub fn begin_call(&mut self, id: u64) {
        self.calls.push_back(id);
        static CALLING: Once = Once::new();
        CALLING.call_once(|| drop(std::thread::spawn(call_all)));
        signals().calls.notify_all();
    }
}

fn call_all() {
    let mut state = lock();
    loop {
        let Some(id) = state.calls.pop_front() else {
            state.wait(&signals().calls);
            continue;
        };
        if let Some(What::Call(call)) = state.ops.get(&id).map(|op| op.what.clone()) {
            state.without(|| call.call());
        }
        state.finish(id);
    }
}
