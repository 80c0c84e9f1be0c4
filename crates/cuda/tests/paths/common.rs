//! A copier on the fake driver, in a process of the test's own: counters, faults and misuse are the
//! test's alone.

use forebay_cuda::device::{DeviceMemory, HostMemory};
use forebay_cuda::driver::{Driver, LIBRARY_VARIABLE, abi};
use forebay_cuda::{Copier, CopierOptions};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, RegionId};
use std::ffi::{CString, c_char, c_void};
use std::io::Write;
use std::process::Command;
use std::sync::Arc;

/// Says which test a process is to run.
const ALONE: &str = "FOREBAY_CUDA_TEST";

/// Runs a test's body in a process of its own with the fake driver.
pub fn alone(test: &str, env: &[(&str, &str)], body: impl FnOnce(&Fake)) {
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body(&Fake::load());
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(ALONE, test).env("FAKE_CUDA_GPUS", "3");
    // Nothing that was measured counts, unless the test brings it.
    child.env("XDG_CACHE_HOME", "/nonexistent");
    child.env(LIBRARY_VARIABLE, &fake_cuda_install::installed().libcuda).envs(env.iter().copied());
    let output = child.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "no test is called {test}: {said}");
}

/// What tests ask of the fake driver beyond the real one.
pub struct Fake(*mut c_void);

/// Calls a driver's function by its symbol; arguments as `cuda.h` has them.
macro_rules! cu {
    ($fake:expr, $symbol:ident($($arg:expr => $kind:ty),* $(,)?)) => {{
        let address = $fake.symbol(stringify!($symbol));
        // SAFETY: the symbol has this signature.
        let status = unsafe {
            let entry: unsafe extern "C" fn($($kind),*) -> i32 = std::mem::transmute(address);
            entry($($arg),*)
        };
        assert_eq!(status, 0, stringify!($symbol));
    }};
}

impl Fake {
    fn load() -> Fake {
        let path = CString::new(std::env::var(LIBRARY_VARIABLE).unwrap()).unwrap();
        // SAFETY: the fake driver runs nothing when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "cannot load {path:?}");
        Fake(handle)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open for good.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "no symbol {name:?}");
        address
    }

    pub fn control(&self, commands: &str) {
        let commands = CString::new(commands).unwrap();
        cu!(self, fake_cuda_control(commands.as_ptr() => *const c_char));
    }

    pub fn stat(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the symbol has this signature.
        unsafe {
            let stat: unsafe extern "C" fn(*const c_char) -> u64 =
                std::mem::transmute(self.symbol("fake_cuda_stat"));
            stat(name.as_ptr())
        }
    }

    fn misuse(&self) -> u64 {
        // SAFETY: the symbol has this signature.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(self.symbol("fake_cuda_misuse"))(
            )
        }
    }

    /// Captures a stream, in the mode that forbids most, while `body` runs.
    pub fn capture(&self, stream: abi::StreamHandle, body: impl FnOnce()) {
        let mut graph = std::ptr::null_mut();
        cu!(self, cuStreamBeginCapture_v2(stream => abi::StreamHandle, 0 => u32));
        body();
        cu!(self, cuStreamEndCapture(stream => abi::StreamHandle, &mut graph => *mut *mut c_void));
        cu!(self, cuGraphDestroy(graph => *mut c_void));
    }

    /// Has a stream wait until it is released.
    pub fn hold(&self, device: &Arc<forebay_cuda::device::Device>, stream: abi::StreamHandle) -> Held {
        let word = HostMemory::new(device, 8).unwrap();
        // SAFETY: the word is ours.
        unsafe { word.start().cast::<u64>().write_volatile(0) };
        cu!(self, cuStreamWaitValue64_v2(stream => abi::StreamHandle, word.start() as u64 => u64, 1 => u64, 0 => u32));
        Held(word)
    }

    /// Memory of a GPU that no other reaches, as virtual memory management gives it.
    pub fn closed_memory(&self, gpu: i32, bytes: u64) -> u64 {
        /// `CUmemAllocationProp`: pinned memory of a device, not to be exported.
        #[repr(C)]
        struct Prop([i32; 4], [u64; 2]);
        /// `CUmemAccessDesc`.
        #[repr(C)]
        struct Access([i32; 3]);
        let bytes = bytes.next_multiple_of(2 << 20) as usize;
        let (mut handle, mut address) = (0_u64, 0_u64);
        let prop = Prop([1, 0, 1, gpu], [0; 2]);
        cu!(self, cuMemCreate(&mut handle => *mut u64, bytes => usize, &prop => *const Prop, 0 => u64));
        cu!(self, cuMemAddressReserve(&mut address => *mut u64, bytes => usize, 0 => usize, 0 => u64, 0 => u64));
        cu!(self, cuMemMap(address => u64, bytes => usize, 0 => usize, handle => u64, 0 => u64));
        cu!(self, cuMemSetAccess(address => u64, bytes => usize, &Access([1, gpu, 3]) => *const Access, 1 => usize));
        address
    }

    /// Shares follow nothing that is measured: how threads of a busy machine come along is no rate
    /// of a link.
    pub fn world(&self, options: CopierOptions) -> World<'_> {
        let rates = options.rates.unwrap_or_default().fixed();
        self.measuring_world(CopierOptions { rates: Some(rates), ..options })
    }

    /// Shares follow what is measured, unless the options say otherwise.
    pub fn measuring_world(&self, options: CopierOptions) -> World<'_> {
        World { fake: self, copier: Copier::with_driver(Driver::load().unwrap(), &options).unwrap() }
    }
}

/// A stream that waits.
pub struct Held(HostMemory);

impl Held {
    pub fn release(&self) {
        // SAFETY: the word is ours; the driver only reads it.
        unsafe { self.0.start().cast::<u64>().write_volatile(1) };
    }
}

/// A copier with every fake GPU.
pub struct World<'a> {
    pub fake: &'a Fake,
    pub copier: Copier,
}

impl World<'_> {
    pub fn device(&self, gpu: u16) -> &Arc<forebay_cuda::device::Device> {
        self.copier.devices().find(|device| device.index() == gpu).unwrap()
    }

    pub fn host(&self, bytes: u64) -> Arc<Host> {
        Arc::new(Host(HostMemory::new(self.device(0), bytes as usize).unwrap()))
    }

    pub fn memory(&self, gpu: u16, bytes: u64) -> DeviceMemory {
        DeviceMemory::new(self.device(gpu), bytes).unwrap()
    }

    pub fn register(&self, host: &Arc<Host>) -> RegionId {
        self.copier.register_host(Arc::clone(host) as Arc<dyn Backing>).unwrap()
    }

    /// Ends the copier. Nothing was misused, and nothing is left of it.
    pub fn end(self) {
        drop(self.copier);
        assert_eq!(self.fake.misuse(), 0);
        for what in ["live.streams", "live.events", "live.modules"] {
            assert_eq!(self.fake.stat(what), 0, "{what}");
        }
    }
}

/// Pinned host memory.
pub struct Host(HostMemory);

// SAFETY: tests touch the bytes only while no copy does.
unsafe impl Sync for Host {}

// SAFETY: the allocation lives as long as the value and does not move.
unsafe impl Backing for Host {
    fn as_ptr(&self) -> *mut u8 {
        self.0.start()
    }

    fn len(&self) -> usize {
        self.0.bytes()
    }
}

impl Host {
    pub fn address(&self) -> u64 {
        self.0.start() as u64
    }

    pub fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.0.bytes());
        // SAFETY: it fits, and no copy is under way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.start(), bytes.len()) };
    }

    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: all of it was allocated zeroed or written, and no copy is under way.
        unsafe { std::slice::from_raw_parts(self.0.start(), self.0.bytes()).to_vec() }
    }
}

/// The log of this process.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Keeps all lines from now on.
    pub fn start() -> Log {
        let log = Log::default();
        let own = log.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || own.clone());
        tracing::subscriber::set_global_default(lines.finish()).unwrap();
        log
    }

    /// Lines that hold a text.
    pub fn count(&self, text: &str) -> usize {
        String::from_utf8_lossy(&self.0.lock()).lines().filter(|line| line.contains(text)).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17).to_le_bytes();
    (0..bytes.div_ceil(8)).flat_map(word).take(bytes as usize).collect()
}
