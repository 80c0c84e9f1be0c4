//! The fake driver for tests: loaded as programs load it, each test in a process of its own, so
//! that counters, faults and misuse are the test's alone.
#![allow(clippy::unwrap_used, dead_code)]

use std::ffi::{CString, c_char, c_void};
use std::process::Command;

/// Says which test a process is to run, and where the driver is.
const ALONE: &str = "FAKE_CUDA_TEST";
const LIBCUDA: &str = "FAKE_CUDA_TEST_LIBCUDA";

/// Runs a test's body in a process of its own with these variables set.
pub fn alone(test: &str, env: &[(&str, &str)], body: impl FnOnce(&Cuda)) {
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body(&Cuda::load());
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(ALONE, test);
    child.env(LIBCUDA, &fake_cuda_install::installed().libcuda).envs(env.iter().copied());
    let output = child.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "no test is called {test}: {said}");
}

/// The driver.
pub struct Cuda(*mut c_void);

// SAFETY: a handle of dlopen is any thread's to use, and so is what it leads to.
unsafe impl Sync for Cuda {}

pub const PTX: &str =
    ".version 7.0\n.target sm_80\n.visible .entry forebay_pieces(.param .u64 a)\n.entry somebody_elses()";

/// Calls a driver's function by its symbol; arguments as `cuda.h` has them, each cast where it is
/// written.
macro_rules! cu {
    ($cuda:expr, $symbol:ident($($arg:expr => $kind:ty),* $(,)?)) => {{
        let address = $cuda.symbol(stringify!($symbol));
        // SAFETY: the symbol has this signature.
        unsafe {
            let entry: unsafe extern "C" fn($($kind),*) -> i32 = std::mem::transmute(address);
            entry($($arg),*)
        }
    }};
}
pub(crate) use cu;

impl Cuda {
    pub fn load() -> Cuda {
        let path = CString::new(std::env::var(LIBCUDA).unwrap()).unwrap();
        // SAFETY: the fake driver runs nothing when it is loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "cannot load {path:?}");
        Cuda(handle)
    }

    pub fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open for good.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "no symbol {name:?}");
        address
    }

    /// cuInit, and the primary contexts of `gpus` GPUs; the first one's is current.
    pub fn start(&self, gpus: i32) -> Vec<usize> {
        assert_eq!(cu!(self, cuInit(0 => u32)), 0);
        let contexts: Vec<usize> = (0..gpus)
            .map(|gpu| {
                let mut context = 0usize;
                assert_eq!(cu!(self, cuDevicePrimaryCtxRetain(&mut context => *mut usize, gpu => i32)), 0);
                context
            })
            .collect();
        self.enter(contexts[0]);
        contexts
    }

    pub fn enter(&self, context: usize) {
        assert_eq!(cu!(self, cuCtxSetCurrent(context => usize)), 0);
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0u64;
        assert_eq!(cu!(self, cuMemAlloc_v2(&mut address => *mut u64, bytes => usize)), 0);
        address
    }

    pub fn free(&self, address: u64) -> i32 {
        cu!(self, cuMemFree_v2(address => u64))
    }

    /// Pinned host memory, never freed.
    pub fn pinned(&self, bytes: usize) -> &'static mut [u8] {
        let mut address = std::ptr::null_mut::<u8>();
        assert_eq!(cu!(self, cuMemHostAlloc(&mut address => *mut *mut u8, bytes => usize, 0 => u32)), 0);
        // SAFETY: as many fresh bytes, for good.
        unsafe { std::slice::from_raw_parts_mut(address, bytes) }
    }

    /// A stream that blocks with nothing.
    pub fn stream(&self) -> usize {
        self.stream_with(1)
    }

    pub fn stream_with(&self, flags: u32) -> usize {
        let mut stream = 0usize;
        assert_eq!(cu!(self, cuStreamCreate(&mut stream => *mut usize, flags => u32)), 0);
        stream
    }

    pub fn event(&self) -> usize {
        let mut event = 0usize;
        assert_eq!(cu!(self, cuEventCreate(&mut event => *mut usize, 0 => u32)), 0);
        event
    }

    pub fn record(&self, event: usize, stream: usize) -> i32 {
        cu!(self, cuEventRecord(event => usize, stream => usize))
    }

    pub fn wait_event(&self, stream: usize, event: usize) -> i32 {
        cu!(self, cuStreamWaitEvent(stream => usize, event => usize, 0 => u32))
    }

    pub fn copy(&self, to: u64, from: u64, bytes: usize, stream: usize) -> i32 {
        cu!(self, cuMemcpyAsync(to => u64, from => u64, bytes => usize, stream => usize))
    }

    pub fn sync(&self, stream: usize) -> i32 {
        cu!(self, cuStreamSynchronize(stream => usize))
    }

    pub fn query(&self, stream: usize) -> i32 {
        cu!(self, cuStreamQuery(stream => usize))
    }

    pub fn peer(&self, context: usize) {
        assert_eq!(cu!(self, cuCtxEnablePeerAccess(context => usize, 0 => u32)), 0);
    }

    pub fn kernel(&self, name: &str) -> usize {
        let (ptx, name) = (CString::new(PTX).unwrap(), CString::new(name).unwrap());
        let (mut module, mut function) = (0usize, 0usize);
        assert_eq!(cu!(self, cuModuleLoadData(&mut module => *mut usize, ptx.as_ptr() => *const c_char)), 0);
        let code = cu!(self, cuModuleGetFunction(&mut function => *mut usize, module => usize, name.as_ptr() => *const c_char));
        assert_eq!(code, 0);
        function
    }

    /// Launches `forebay_pieces` for pieces given as (from, to, bytes).
    pub fn copy_pieces(&self, stream: usize, pieces: &[[u64; 3]]) -> i32 {
        let list = self.pinned(size_of_val(pieces).max(1));
        let words = pieces.as_flattened().iter().flat_map(|word| word.to_le_bytes());
        list.iter_mut().zip(words).for_each(|(byte, word)| *byte = word);
        self.launch(self.kernel("forebay_pieces"), stream, &[at(list), pieces.len() as u64])
    }

    /// Launches with arguments given as (value, bytes of it are read by the kernel's signature).
    pub fn launch(&self, function: usize, stream: usize, args: &[u64]) -> i32 {
        let pointers: Vec<*const u64> = args.iter().map(|arg| arg as *const u64).collect();
        cu!(self, cuLaunchKernel(function => usize, 1 => u32, 1 => u32, 1 => u32, 256 => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => usize, pointers.as_ptr() => *const *const u64, std::ptr::null() => *const c_void))
    }

    pub fn control(&self, commands: &str) {
        let text = CString::new(commands).unwrap();
        assert_eq!(cu!(self, fake_cuda_control(text.as_ptr() => *const c_char)), 0, "{commands}");
    }

    pub fn stat(&self, name: &str) -> u64 {
        let text = CString::new(name).unwrap();
        // SAFETY: the symbol has this signature.
        let value = unsafe {
            let stat: unsafe extern "C" fn(*const c_char) -> u64 =
                std::mem::transmute(self.symbol("fake_cuda_stat"));
            stat(text.as_ptr())
        };
        assert_ne!(value, u64::MAX, "{name}");
        value
    }

    /// What was misused so far.
    pub fn report(&self) -> String {
        let mut buffer = vec![0u8; 65536];
        // SAFETY: the symbol has this signature.
        let bytes = unsafe {
            let report: unsafe extern "C" fn(*mut u8, u64) -> u64 =
                std::mem::transmute(self.symbol("fake_cuda_report"));
            report(buffer.as_mut_ptr(), buffer.len() as u64)
        };
        buffer.truncate(bytes as usize);
        String::from_utf8(buffer).unwrap()
    }
}

/// The address of bytes.
pub fn at(bytes: &[u8]) -> u64 {
    bytes.as_ptr() as u64
}
