//! Blocks in memory of a GPU. Driver: it copies there and back, a block at a time, and waits. The
//! asking end has the first GPU and the owner the last one, which may be the same.

use crate::output::Error;
use forebay_cuda::device::{Device, DeviceMemory, HostMemory, Stream};
use forebay_cuda::driver::{CudaError, Driver};
use forebay_cuda::ipc_memory::IpcMemory;
use forebay_cuda::places::GpuPlaces;
use forebay_net::{Access, Agent, Registration};
use forebay_transfer::lock::Mutex;
use std::sync::{Arc, OnceLock};

/// Of the copies here, which are not measured.
const BOUNCE_BYTES: usize = 4 << 20;

/// How bytes go between GPUs of two processes of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GpuWay {
    /// The asking end's GPU copies, over CUDA IPC
    Ipc,
    /// Through pinned host memory and a connection
    Tcp,
}

impl GpuWay {
    pub fn name(self) -> &'static str {
        match self {
            GpuWay::Ipc => "ipc",
            GpuWay::Tcp => "tcp",
        }
    }
}

/// Memory of a GPU, which an agent may move bytes from and to meanwhile.
pub struct GpuMemory {
    driver: &'static Driver,
    device: Arc<Device>,
    memory: DeviceMemory,
    /// Through which its bytes are filled and compared.
    bounce: Mutex<(HostMemory, Stream)>,
    /// Of the agent that offers it.
    places: OnceLock<Arc<GpuPlaces>>,
}

impl GpuMemory {
    /// Of the first GPU, or of the last one.
    pub fn new(of_last: bool, bytes: usize) -> Result<GpuMemory, Error> {
        let driver = Driver::load()?;
        let gpu = if of_last { Device::count(driver)?.saturating_sub(1) } else { 0 };
        let device = Device::open(driver, gpu)?;
        let memory = DeviceMemory::new(&device, bytes as u64)?;
        let bounce = Mutex::new((HostMemory::new(&device, BOUNCE_BYTES)?, Stream::new(&device)?));
        Ok(GpuMemory { driver, device, memory, bounce, places: OnceLock::new() })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The first byte.
    pub fn start(&self) -> u64 {
        self.memory.address()
    }

    /// What another process opens it by.
    pub fn export(&self) -> Result<String, Error> {
        Ok(hex::encode(self.memory.export()?.0))
    }

    pub fn register(&self, agent: &Agent, way: GpuWay) -> Result<Registration, Error> {
        let places = Arc::new(GpuPlaces::new(self.driver, agent.mover().clone())?);
        let (start, bytes) = (self.memory.address(), self.memory.bytes());
        // SAFETY: the memory stays until the agent has ended, and is filled and compared between
        // transfers only.
        let (gpu, region) = unsafe { places.register(self.device.index(), start, bytes) }?;
        let known = forebay_net::Device { place: gpu.place, to_host: gpu.to_host, from_host: gpu.from_host };
        let own = Arc::clone(&places);
        let pinned = Arc::new(move |bytes| own.pinned(bytes).map_err(|error| error.to_string()));
        agent.add_device(known, pinned)?;
        if way == GpuWay::Ipc {
            agent.add_ipc(Arc::new(IpcMemory::new(&places)))?;
        }
        // Kept until the agent has ended.
        let _ = self.places.set(places);
        Ok(agent.register_device(gpu.place, (region, start, bytes), Access::OPEN)?)
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        let Some(at) = self.address(offset, bytes.len()) else { return false };
        let (host, stream) = &*self.bounce.lock();
        bytes.chunks(BOUNCE_BYTES).enumerate().all(|(nth, part)| {
            // SAFETY: a part is no longer than the memory, which no copy uses now.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), host.start(), part.len()) };
            let there = at + (nth * BOUNCE_BYTES) as u64;
            self.copy(stream, host.start() as u64, there, part.len()).is_ok()
        })
    }

    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let Some(at) = self.address(offset, bytes.len()) else { return false };
        let (host, stream) = &*self.bounce.lock();
        bytes.chunks_mut(BOUNCE_BYTES).enumerate().all(|(nth, part)| {
            let there = at + (nth * BOUNCE_BYTES) as u64;
            let copied = self.copy(stream, there, host.start() as u64, part.len()).is_ok();
            // SAFETY: as in `write`.
            unsafe { std::ptr::copy_nonoverlapping(host.start(), part.as_mut_ptr(), part.len()) };
            copied
        })
    }

    /// Where bytes lie. `None`: not all of them do.
    fn address(&self, offset: usize, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end as u64 <= self.memory.bytes()).then(|| self.memory.address() + offset as u64)
    }

    fn copy(&self, stream: &Stream, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        // SAFETY: the caller keeps within both memories, which outlive the wait.
        unsafe { stream.copy(from, to, bytes as u64)? };
        stream.synchronize()
    }
}
