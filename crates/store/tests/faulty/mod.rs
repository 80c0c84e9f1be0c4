//! A link that copies like the host link and can be told to fail, to hold its operations back or to
//! flip a bit.

use forebay_transfer::{Completion, HostLink, Link, LinkOp, Memory, Outcome};
use std::sync::{Arc, Mutex};

/// What is done to operations from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing. Operations held back start.
    None,
    /// They report an error.
    Fail,
    /// They do not start.
    Hold,
    /// They copy, and then one bit of the last target is flipped.
    FlipBit,
}

type Held = (LinkOp, Arc<Memory>, Completion);

#[derive(Clone)]
pub struct Faulty {
    state: Arc<Mutex<State>>,
}

struct State {
    fault: Fault,
    held: Vec<Held>,
    link: HostLink,
}

impl Faulty {
    pub fn new() -> Faulty {
        let state = State { fault: Fault::None, held: Vec::new(), link: HostLink::new(1).unwrap() };
        Faulty { state: Arc::new(Mutex::new(state)) }
    }

    pub fn link(&self) -> Box<dyn Link> {
        Box::new(self.clone())
    }

    pub fn set(&self, fault: Fault) {
        let mut state = self.state.lock().unwrap();
        state.fault = fault;
        if fault != Fault::Hold {
            for (op, memory, done) in std::mem::take(&mut state.held) {
                state.link.start(op, &memory, done);
            }
        }
    }
}

impl Link for Faulty {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let mut state = self.state.lock().unwrap();
        match state.fault {
            Fault::None => state.link.start(op, memory, done),
            Fault::Fail => done.finish(Outcome::Failed { error: "told to".into() }),
            Fault::Hold => state.held.push((op, Arc::clone(memory), done)),
            Fault::FlipBit => {
                let (target, bytes) = memory.host(&op.pairs.last().unwrap().to).unwrap();
                let address = target.as_ptr() as usize + bytes / 2;
                let flip = move |_: &Outcome| {
                    let byte = address as *mut u8;
                    // SAFETY: inside a span that the operation still owns.
                    unsafe { byte.write(byte.read() ^ 0x10) };
                };
                state.link.start(op, memory, done.inspect(flip));
            }
        }
    }
}
