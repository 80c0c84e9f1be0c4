//! The owner's end: who may reach which memory of GPUs now. A grant is for one operation. It ends
//! when the peer says that its copies are over, or when its process has ended, with which its
//! copies end; never because a connection has, since copies go on without one. Nothing that a peer
//! says is trusted.

use super::messages::{Answer, Question};
use crate::capabilities::Host;
use crate::host_process::HostProcess;
use crate::tcp::{Command, Exports, Fault, FaultCode, Granted, Identity, OpKind, PeerRegion, Reply};
use forebay_transfer::Ipc;
use forebay_transfer::lock::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::time::Timespec;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Grants of one peer at a time: more than its windows of lots hold.
const GRANTS_MAX: usize = 256;
/// Peers that have memory open, at most.
const HOLDERS_MAX: usize = 1024;
/// Exports at a time; others are refused. Each has a thread for the milliseconds that it takes.
const EXPORTING_MAX: usize = 8;
/// How long memory that is given back is waited for, as long as for other copies.
const QUIET_LIMIT: Duration = Duration::from_secs(10);
/// How often it is looked whether a peer's process has ended meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What this agent's peers may reach.
pub(crate) struct Grants {
    exports: Arc<Exports>,
    host: Host,
    ipc: OnceLock<Arc<dyn Ipc>>,
    exporting: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By instance.
    holders: HashMap<[u8; 16], Holder>,
    closed: bool,
}

/// A peer.
struct Holder {
    /// Readable when it has ended.
    process: OwnedFd,
    granted: BTreeMap<u64, Granted>,
    /// Numbers up to this one are not granted any more: an end may overtake its beginning where
    /// the two come over different connections.
    ended: u64,
}

impl Holder {
    fn has_ended(&self) -> bool {
        let mut process = [PollFd::new(&self.process, PollFlags::IN)];
        matches!(poll(&mut process, Some(&Timespec::default())), Ok(1..))
    }
}

impl State {
    /// Forgets peers whose processes have ended.
    fn forget_ended(&mut self) {
        self.holders.retain(|_, holder| !holder.has_ended());
    }

    /// Peers whose GPUs may reach what `is_meant` says.
    fn reached_by(&self, is_meant: impl Fn(&PeerRegion) -> bool) -> usize {
        let reaches =
            |holder: &&Holder| holder.granted.values().any(|granted| granted.regions.iter().any(&is_meant));
        self.holders.values().filter(reaches).count()
    }
}

fn fault(code: FaultCode, text: impl Into<String>) -> Answer {
    Answer::Fault(Fault::new(code, text))
}

impl Grants {
    pub fn new(exports: Arc<Exports>, host: Host) -> Grants {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Grants { exports, host, ipc: OnceLock::new(), exporting: AtomicUsize::new(0), state, changed }
    }

    /// Memory of GPUs is exported from now on.
    pub fn export_by(&self, ipc: Arc<dyn Ipc>) {
        // One for all: the first one that is given.
        let _ = self.ipc.set(ipc);
    }

    /// Answers what a peer says; on a thread of its own what takes its time.
    pub fn call(self: &Arc<Grants>, from: Identity, body: &[u8], reply: Reply) {
        match Question::parse(body) {
            Some(Question::Begin { number, op_kind, command }) => {
                reply.send(self.begin(from, number, op_kind, &command).to_bytes());
            }
            Some(Question::End { number }) => reply.send(self.end(from, number).to_bytes()),
            Some(Question::Open { host, process, key, generation }) => {
                if self.exporting.fetch_add(1, Ordering::AcqRel) >= EXPORTING_MAX {
                    self.exporting.fetch_sub(1, Ordering::AcqRel);
                    return reply.refuse(format!("{EXPORTING_MAX} regions are being exported"));
                }
                let own = Exporting(Arc::clone(self));
                // Without a thread the reply is dropped, which refuses.
                let answer = move || {
                    let answer = own.0.open(from, host, process, key, generation);
                    reply.send(answer.to_bytes());
                };
                let _ = std::thread::Builder::new().name("forebay-export".into()).spawn(answer);
            }
            None => reply.refuse("words about memory of GPUs that mean nothing here".into()),
        }
    }

    fn open(
        &self,
        from: Identity,
        host: [u8; 16],
        process: HostProcess,
        key: u64,
        generation: u64,
    ) -> Answer {
        let region = match self.exports.device_region(key, generation) {
            Ok(Some(region)) => region,
            Ok(None) => return Answer::HostMemory,
            Err(fault) => return Answer::Fault(fault),
        };
        if self.host != Some(host) {
            return Answer::NotExported("the peer is on another host".into());
        }
        let Some(ipc) = self.ipc.get() else {
            return Answer::NotExported("the owner was not told to export memory of GPUs".into());
        };
        let process = match process.watch() {
            Ok(process) => process,
            Err(why) => return Answer::NotExported(format!("the peer's process cannot be watched: {why}")),
        };
        if let Err(why) = self.admit(from, process) {
            return Answer::NotExported(why);
        }
        match ipc.export(region) {
            Ok(exported) => Answer::Yes(exported),
            Err(why) => Answer::NotExported(why),
        }
    }

    fn admit(&self, from: Identity, process: OwnedFd) -> Result<(), String> {
        let mut state = self.state.lock();
        state.forget_ended();
        if state.holders.len() >= HOLDERS_MAX && !state.holders.contains_key(&from.instance) {
            return Err(format!("{HOLDERS_MAX} peers have memory open; no more may"));
        }
        let new = || Holder { process, granted: BTreeMap::new(), ended: 0 };
        state.holders.entry(from.instance).or_insert_with(new);
        Ok(())
    }

    fn begin(&self, from: Identity, number: u64, op_kind: OpKind, command: &Command) -> Answer {
        let mut state = self.state.lock();
        if state.closed {
            return fault(FaultCode::Closing, "the node is about to end");
        }
        let Some(holder) = state.holders.get_mut(&from.instance) else {
            return fault(FaultCode::NotAllowed, "the peer has opened nothing");
        };
        if number <= holder.ended || holder.granted.contains_key(&number) {
            return fault(FaultCode::NotAllowed, format!("grant {number} was ended, or is there already"));
        }
        if holder.granted.len() >= GRANTS_MAX {
            return fault(FaultCode::NotAllowed, format!("{GRANTS_MAX} grants are there; no more may be"));
        }
        let keep = |granted| drop(holder.granted.insert(number, granted));
        match self.exports.grant(command, op_kind, keep) {
            Ok(()) => Answer::Yes(Vec::new()),
            Err(fault) => Answer::Fault(fault),
        }
    }

    /// A peer touches nothing more. Says whether it was allowed to until now.
    fn end(&self, from: Identity, number: u64) -> Answer {
        let mut state = self.state.lock();
        let holder = state.holders.get_mut(&from.instance);
        let granted = holder.and_then(|holder| {
            let granted = holder.granted.remove(&number);
            if granted.is_none() {
                holder.ended = holder.ended.max(number);
            }
            granted
        });
        drop(state);
        self.changed.notify_all();
        let Some(granted) = granted else {
            return fault(FaultCode::NotAllowed, format!("there is no grant {number}"));
        };
        match self.exports.are_leased(&granted) {
            Ok(()) => Answer::Yes(Vec::new()),
            Err(fault) => Answer::Fault(fault),
        }
    }

    /// A peer's last connection has ended. What it was granted stays its own.
    pub fn gone(&self, from: Identity) {
        let mut state = self.state.lock();
        let idle = state.holders.get(&from.instance).is_some_and(|holder| holder.granted.is_empty());
        if idle {
            state.holders.remove(&from.instance);
        }
    }

    /// Waits until no peer's GPU may reach a region that is withdrawn. An error says how many may
    /// still: the memory must stay as it is.
    pub fn wait_until_quiet(&self, region: PeerRegion) -> Result<(), usize> {
        self.wait(|other| *other == region)
    }

    /// Grants nothing any more, and waits until no peer's GPU may reach anything.
    pub fn close(&self) -> Result<(), usize> {
        self.state.lock().closed = true;
        self.wait(|_| true)
    }

    fn wait(&self, is_meant: impl Fn(&PeerRegion) -> bool) -> Result<(), usize> {
        let until = Instant::now() + QUIET_LIMIT;
        let mut state = self.state.lock();
        loop {
            let mut reached_by = state.reached_by(&is_meant);
            if reached_by > 0 {
                state.forget_ended();
                reached_by = state.reached_by(&is_meant);
            }
            match reached_by {
                0 => return Ok(()),
                peers if Instant::now() >= until => return Err(peers),
                _ => drop(self.changed.wait_for(&mut state, LOOK_AGAIN)),
            }
        }
    }
}

/// One of those that are exported at a time.
struct Exporting(Arc<Grants>);

impl Drop for Exporting {
    fn drop(&mut self) {
        self.0.exporting.fetch_sub(1, Ordering::AcqRel);
    }
}
