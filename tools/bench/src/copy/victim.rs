//! What relaying costs the GPU that relays: a product of matrices, a product of a matrix and a
//! vector, and its own copies to a peer, each by itself and while copies for another GPU go on in
//! both directions.

use super::ends::Job;
use super::plan::Plan;
use super::rig::Rig;
use super::way::Way;
use crate::output::Outcome;
use forebay_cuda::device::{Device, DeviceMemory, Stream};
use forebay_cuda::driver::abi::{self, FunctionHandle, ModuleHandle};
use forebay_cuda::links::Direction;
use forebay_results::Row;
use libc::c_void;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const PTX: &str = concat!(include_str!("../../kernels/victim.ptx"), "\0");
/// Rows and columns of the matrices that are multiplied, and how often that is done: some tens of
/// milliseconds.
const PRODUCT: (u32, u32) = (4096, 8);
/// The same of the matrix that is multiplied with a vector: a GiB.
const VECTOR: (u32, u32) = (16_384, 128);
/// Cycles of a kernel that only spins.
const SPIN_CYCLES: u64 = 20_000_000;
/// Bytes of a copy between GPUs at most, and how many are made.
const PEER_BYTES_MAX: u64 = 256 << 20;
const PEER_COPIES: u32 = 64;
/// Bytes of the copies that are relayed at most.
const LOAD_BYTES_MAX: u64 = 1 << 30;
/// Copies have begun by then, or never will.
const BEGIN_WITHIN: Duration = Duration::from_secs(60);

/// Rows of what slows down how much.
pub fn rows(rig: &Rig, plan: &Plan) -> Outcome<Vec<Row>> {
    let target = plan.first();
    let devices = rig.ends.iter().map(|ends| &ends.device);
    let relay = devices.clone().find(|device| usize::from(device.index()) != target);
    let relay = relay.ok_or("there is no relay")?;
    // Its copies go to a GPU that has nothing to do with it where there is one.
    let other =
        devices.rev().find(|device| device.index() != relay.index()).ok_or("there is no other GPU")?;
    let bytes = rig.ends[target].bytes();
    let jobs = Direction::BOTH.map(|direction| rig.whole(target, direction, bytes.min(LOAD_BYTES_MAX)));
    let load = Load { rig, jobs: &jobs };
    let module = Module::load(relay)?;
    let (product, vector) = (Product::matrices(&module)?, Product::vector(&module)?);
    let copies = PeerCopies::new(relay, other, bytes.min(PEER_BYTES_MAX))?;
    let (slowdown, unit) = (|name: &str| format!("copy.victim.{name}_slowdown"), "%");
    let runs = plan.runs;
    Ok(vec![
        Row::of_runs(slowdown("matmul"), unit, &load.slowdowns(runs, || product.seconds())?),
        Row::of_runs(slowdown("matvec"), unit, &load.slowdowns(runs, || vector.seconds())?),
        Row::of_runs(slowdown("p2p"), unit, &load.slowdowns(runs, || copies.seconds())?),
    ])
}

/// Copies that go on.
struct Load<'a> {
    rig: &'a Rig,
    jobs: &'a [Job],
}

impl Load<'_> {
    /// By how many percent work takes longer while copies go on, in each run.
    fn slowdowns(&self, runs: u32, work: impl Fn() -> Outcome<f64>) -> Outcome<Vec<f64>> {
        work()?;
        let once = |_| {
            let alone_s = work()?;
            let loaded_s = self.during(&work)?;
            Ok((loaded_s / alone_s - 1.0) * 100.0)
        };
        (0..runs).map(once).collect()
    }

    /// Works while copies go on.
    fn during(&self, work: impl FnOnce() -> Outcome<f64>) -> Outcome<f64> {
        let (rig, jobs, stop) = (self.rig, self.jobs, &AtomicBool::new(false));
        rig.clear(jobs)?;
        let (begun, begins) = mpsc::channel();
        let seconds = thread::scope(|scope| {
            let copiers: Vec<_> = jobs
                .iter()
                .map(|job| {
                    let begun = begun.clone();
                    scope.spawn(move || copy_until(rig, job, stop, &begun))
                })
                .collect();
            drop(begun);
            let all_begun = jobs.iter().try_for_each(|_| begins.recv_timeout(BEGIN_WITHIN));
            let seconds = all_begun.map_err(|_| "copies did not begin".into()).and_then(|()| work());
            stop.store(true, Ordering::Relaxed);
            for copier in copiers {
                copier.join().unwrap_or_else(|_| Err("a thread that copies has panicked".into()))?;
            }
            seconds
        })?;
        rig.check(jobs)?;
        Ok(seconds)
    }
}

/// Copies again and again; tells when it is doing so.
fn copy_until(rig: &Rig, job: &Job, stop: &AtomicBool, begun: &mpsc::Sender<()>) -> Outcome<()> {
    let ends = &rig.ends[job.gpu];
    rig.ways().copy(Way::Best, ends, job)?;
    // Whoever no longer waits for it has stopped.
    let _ = begun.send(());
    while !stop.load(Ordering::Relaxed) {
        rig.ways().copy(Way::Best, ends, job)?;
    }
    Ok(())
}

/// The kernels, loaded for one GPU.
struct Module {
    device: Arc<Device>,
    handle: ModuleHandle,
}

impl Module {
    fn load(device: &Arc<Device>) -> Outcome<Module> {
        let (_current, driver) = (device.enter()?, device.driver());
        let mut handle = std::ptr::null_mut();
        // SAFETY: the result is written to a valid place; the text ends with a zero byte.
        let status = unsafe { (driver.table().module_load)(&mut handle, PTX.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        Ok(Module { device: Arc::clone(device), handle })
    }

    /// A kernel; `None` where the driver has none of this name.
    fn kernel(&self, name: &CStr) -> Outcome<Option<FunctionHandle>> {
        let (_current, driver) = (self.device.enter()?, self.device.driver());
        let mut kernel = std::ptr::null_mut();
        // SAFETY: the module is loaded, the result is written to a valid place and the name is a C
        // string.
        let status = unsafe { (driver.table().module_function)(&mut kernel, self.handle, name.as_ptr()) };
        if status == abi::NOT_FOUND {
            return Ok(None);
        }
        driver.check("cuModuleGetFunction", status)?;
        Ok(Some(kernel))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: loaded by `load`, unloaded once.
        unsafe { (self.device.driver().table().module_unload)(self.handle) };
    }
}

/// Launches of a kernel that multiplies, or of one that spins where there is none that multiplies.
struct Product<'a> {
    module: &'a Module,
    kernel: FunctionHandle,
    stream: Stream,
    /// The factors and the product, which are no numbers in particular.
    memory: Option<[DeviceMemory; 3]>,
    side: u32,
    grid: (u32, u32),
    launches: u32,
}

impl Product<'_> {
    fn matrices(module: &Module) -> Outcome<Product<'_>> {
        let (side, launches) = PRODUCT;
        let bytes = u64::from(side) * u64::from(side) * 4;
        Product::new(module, c"forebay_product", [bytes; 3], side, (side / 64, side / 64), launches)
    }

    fn vector(module: &Module) -> Outcome<Product<'_>> {
        let (side, launches) = VECTOR;
        let row = u64::from(side) * 4;
        let bytes = [u64::from(side) * row, row, row];
        Product::new(module, c"forebay_product_vector", bytes, side, (side / 8, 1), launches)
    }

    fn new<'a>(
        module: &'a Module,
        name: &CStr,
        bytes: [u64; 3],
        side: u32,
        grid: (u32, u32),
        launches: u32,
    ) -> Outcome<Product<'a>> {
        let (device, stream) = (&module.device, Stream::new(&module.device)?);
        let Some(kernel) = module.kernel(name)? else {
            let kernel = module.kernel(c"forebay_spin")?.ok_or("the driver has no kernel at all")?;
            return Ok(Product { module, kernel, stream, memory: None, side, grid: (1, 1), launches: 1 });
        };
        let [left, right, product] = bytes;
        let memory = [filled(&stream, left)?, filled(&stream, right)?, DeviceMemory::new(device, product)?];
        Ok(Product { module, kernel, stream, memory: Some(memory), side, grid, launches })
    }

    /// How long all launches take.
    fn seconds(&self) -> Outcome<f64> {
        let _current = self.module.device.enter()?;
        let begin = Instant::now();
        for _ in 0..self.launches {
            self.launch()?;
        }
        self.stream.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    fn launch(&self) -> Outcome<()> {
        let (driver, (wide, high)) = (self.module.device.driver(), self.grid);
        let mut addresses = self.memory.as_ref().map(|memory| memory.each_ref().map(DeviceMemory::address));
        let (mut side, mut cycles) = (self.side, SPIN_CYCLES);
        let mut parameters: Vec<*mut c_void> = match &mut addresses {
            Some(addresses) => {
                let all = addresses.iter_mut().map(|address| (&raw mut *address).cast());
                all.chain([(&raw mut side).cast()]).collect()
            }
            None => vec![(&raw mut cycles).cast()],
        };
        let (stream, list, threads) = (self.stream.handle(), parameters.as_mut_ptr(), 256);
        // SAFETY: the parameters have the types of the kernel's, and the memory is as long as the
        // grid reaches.
        let status = unsafe {
            let launch = driver.table().launch;
            launch(self.kernel, wide, high, 1, threads, 1, 1, 0, stream, list, std::ptr::null_mut())
        };
        Ok(driver.check("cuLaunchKernel", status)?)
    }
}

/// Memory of small numbers, so that a product is neither infinite nor nothing.
fn filled(stream: &Stream, bytes: u64) -> Outcome<DeviceMemory> {
    let (memory, driver) = (DeviceMemory::new(stream.device(), bytes)?, stream.device().driver());
    let _current = stream.device().enter()?;
    // SAFETY: the range was just allocated; the stream is of the current device.
    let status =
        unsafe { (driver.table().set_async)(memory.address(), 0x3c, bytes as abi::Size, stream.handle()) };
    driver.check("cuMemsetD8Async", status)?;
    stream.synchronize()?;
    Ok(memory)
}

/// Copies from the relay's memory to that of another GPU.
struct PeerCopies {
    stream: Stream,
    from: DeviceMemory,
    to: DeviceMemory,
}

impl PeerCopies {
    fn new(relay: &Arc<Device>, other: &Arc<Device>, bytes: u64) -> Outcome<PeerCopies> {
        if !relay.connect(other) {
            return Err(
                format!("GPUs {} and {} do not reach each other", relay.index(), other.index()).into()
            );
        }
        let stream = Stream::new(relay)?;
        Ok(PeerCopies { from: filled(&stream, bytes)?, to: DeviceMemory::new(other, bytes)?, stream })
    }

    /// How long all copies take.
    fn seconds(&self) -> Outcome<f64> {
        let _current = self.stream.device().enter()?;
        let begin = Instant::now();
        for _ in 0..PEER_COPIES {
            // SAFETY: both ranges are as long as stated and used by nothing else; the stream's
            // device reaches both.
            unsafe { self.stream.copy(self.from.address(), self.to.address(), self.from.bytes())? };
        }
        self.stream.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }
}
