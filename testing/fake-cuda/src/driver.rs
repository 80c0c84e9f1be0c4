//! The driver's state and the lock around it.

use crate::abi::{Code, Outcome};
use crate::faults::Faults;
use crate::kernels::Kernel;
use crate::links::Links;
use crate::memory::{Mapping, Memory, Physical};
use crate::misuse::Misuse;
use crate::op::Op;
use crate::order::Order;
use crate::settings::Settings;
use crate::stats::Stats;
use crate::stream::{Capture, Event, Recorded, Stream};
use forebay_transfer::lock::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::time::Duration;

/// A GPU with its primary context.
#[derive(Default)]
pub struct Gpu {
    /// How often its context is retained.
    pub retained: u32,
    /// The error that sticks to its context.
    pub poison: Option<Code>,
    /// Whether others go on as if what it has under way had ended.
    pub is_abandoned: bool,
    /// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
    pub compute_mode: i32,
}

/// Kernels' names, loaded into a GPU's context.
pub struct Module {
    pub gpu: usize,
    pub names: Vec<String>,
}

/// A kernel of a module.
#[derive(Clone, Copy)]
pub struct Function {
    pub module: usize,
    pub kernel: &'static Kernel,
}

/// The engines of a GPU: copies from the host, copies to the host, copies from GPU to GPU or inside
/// of one, and kernels.
pub const ENGINES: [&str; 4] = ["h2d", "d2h", "p2p", "compute"];

/// An engine of a GPU.
#[derive(Default)]
pub struct Engine {
    /// Operations that may begin.
    pub ready: VecDeque<u64>,
    /// Held up so long before each operation.
    pub delay: Duration,
    pub frozen: bool,
    /// Its thread was started.
    pub running: bool,
}

/// Everything.
pub struct State {
    pub settings: Settings,
    pub initialised: bool,
    /// The symbol that is being called.
    pub calling: &'static str,
    pub gpus: Vec<Gpu>,
    pub memory: Memory,
    /// What cuMemCreate gave and addresses that cuMemAddressReserve gave.
    pub handles: HashMap<u64, Physical>,
    pub reserved: HashMap<u64, (u64, Mapping)>,
    /// Opened memory of other processes, by (process, inode, GPU): where, and how often.
    pub opened: HashMap<(u64, u64, usize), (u64, u32)>,
    pub streams: HashMap<usize, Stream>,
    pub default_streams: HashMap<(usize, Option<usize>), usize>,
    pub events: HashMap<usize, Event>,
    pub captures: Vec<Capture>,
    pub graphs: HashMap<usize, Vec<Recorded>>,
    pub modules: HashMap<usize, Module>,
    pub functions: HashMap<usize, Function>,
    pub ops: HashMap<u64, Op>,
    /// Those of all GPUs, as [`ENGINES`] of each.
    pub engines: Vec<Engine>,
    /// Operations that wait for a value in memory.
    pub waiting: Vec<u64>,
    pub links: Links,
    pub order: Order,
    pub faults: Faults,
    pub misuse: Misuse,
    pub stats: Stats,
    serial: u64,
}

/// What threads sleep on.
pub struct Signals {
    /// An operation has ended.
    pub done: Condvar,
    pub engines: Vec<Condvar>,
    pub waiting: Condvar,
}

struct Driver {
    pid: u32,
    state: Mutex<State>,
    signals: Signals,
}

fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let mut state = State::new(Settings::read());
        let (rates, faults) = (state.settings.rates.clone(), state.settings.faults.clone());
        let set = state.links.set(&rates).and_then(|()| state.command(&faults));
        if let Err(error) = &set {
            eprintln!("fake-cuda: {error}");
            state.settings.visible.clear();
        }
        let engines = state.engines.iter().map(|_| Condvar::new()).collect();
        let signals = Signals { done: Condvar::new(), engines, waiting: Condvar::new() };
        Driver { pid: std::process::id(), state: Mutex::new(state), signals }
    })
}

/// What threads sleep on.
pub fn signals() -> &'static Signals {
    &driver().signals
}

/// Whether this process was forked from the one that loaded the driver: nothing works there.
pub fn forked() -> bool {
    driver().pid != std::process::id()
}

impl State {
    fn new(settings: Result<Settings, String>) -> State {
        let settings = settings.unwrap_or_else(|error| {
            eprintln!("fake-cuda: {error}");
            Settings::nothing()
        });
        let gpus = settings.gpus;
        State {
            settings,
            initialised: false,
            calling: "",
            gpus: (0..gpus).map(|_| Gpu::default()).collect(),
            memory: Memory::default(),
            handles: HashMap::new(),
            reserved: HashMap::new(),
            opened: HashMap::new(),
            streams: HashMap::new(),
            default_streams: HashMap::new(),
            events: HashMap::new(),
            captures: Vec::new(),
            graphs: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            ops: HashMap::new(),
            engines: (0..gpus * ENGINES.len()).map(|_| Engine::default()).collect(),
            waiting: Vec::new(),
            links: Links::default(),
            order: Order::default(),
            faults: Faults::default(),
            misuse: Misuse::default(),
            stats: Stats::default(),
            serial: 0,
        }
    }

    /// Nothing goes before cuInit, nor where the settings make no sense.
    pub fn ready(&self) -> Outcome {
        if self.initialised { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
    }

    /// Reports what the call that is being served does and must not do.
    pub fn misused(&mut self, what: impl Display) {
        self.misuse.report(format!("{}: {what}", self.calling));
    }

    /// A handle that no other object has, far from every address and from the small numbers that
    /// mean default streams.
    pub fn new_handle(&mut self) -> usize {
        self.serial += 1;
        0xfa4e_0000_0000_0000 + (self.serial as usize) * 16
    }
}

pub struct Locked(Option<MutexGuard<'static, State>>);

/// Locks the state.
pub fn lock() -> Locked {
    Locked(Some(acquire()))
}

fn acquire() -> MutexGuard<'static, State> {
    driver().state.lock()
}

impl Locked {
    /// Sleeps until `signal`, and sometimes not that long.
    pub fn wait(&mut self, signal: &Condvar) {
        if let Some(guard) = &mut self.0 {
            signal.wait(guard);
        }
    }

    /// As [`wait`](Locked::wait), and not longer than `limit`.
    pub fn wait_for(&mut self, signal: &Condvar, limit: Duration) {
        if let Some(guard) = &mut self.0 {
            signal.wait_for(guard, limit);
        }
    }

    /// Does something while others may have the state.
    pub fn without<T>(&mut self, what: impl FnOnce() -> T) -> T {
        self.0 = None;
        let result = what();
        self.0 = Some(acquire());
        result
    }
}

impl Deref for Locked {
    type Target = State;
    fn deref(&self) -> &State {
        match &self.0 {
            Some(guard) => guard,
            None => unreachable!("the state is only away inside of this file's functions"),
        }
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut State {
        match &mut self.0 {
            Some(guard) => guard,
            None => unreachable!("the state is only away inside of this file's functions"),
        }
    }
}
