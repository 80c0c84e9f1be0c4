//! A GPU and what belongs to its context: streams, events, memory. Each value owns what it names
//! and gives it back when it is dropped.

use crate::access;
use crate::driver::{CudaError, Driver, Table, abi, abi::Address, call};
use crate::gpu::Gpu;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A GPU with its primary context, which is shared with everything else in the process.
pub struct Device {
    gpu: Gpu,
    context: abi::ContextHandle,
    /// Its context was reset: what it had is gone, and nothing may name that.
    is_gone: AtomicBool,
}

// SAFETY: a context may be current on any thread; the driver's functions are thread-safe.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A device's context is current on this thread while it lives.
pub struct Current<'a> {
    device: &'a Device,
    /// Not to be sent: currency belongs to the thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Device {
    /// Opens the GPU of an ordinal. Creates its primary context if nothing in the process has yet.
    pub fn open(driver: &'static Driver, index: u16) -> Result<Arc<Device>, CudaError> {
        let gpu = Gpu::find(driver, index)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the result is written to a valid place.
        unsafe { call!(driver, primary_context_retain(&mut context, gpu.id)) }?;
        Ok(Arc::new(Device { gpu, context, is_gone: AtomicBool::new(false) }))
    }

    pub fn count(driver: &Driver) -> Result<u16, CudaError> {
        Gpu::count(driver)
    }

    pub fn context(&self) -> abi::ContextHandle {
        self.context
    }

    /// Lets this GPU read and write the memory of another. Doing so again does nothing.
    pub fn reach(&self, other: &Device) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: the other device's context lives as long as it does.
        let enable = || unsafe { (self.driver.table().context_enable_peer)(other.context, 0) };
        self.driver.check(Table::context_enable_peer, access::need(self.context, other.context, enable))
    }

    /// Lets two GPUs reach each other's memory. Says whether they do: where not, there is simply no
    /// relay.
    pub fn connect(&self, peer: &Device) -> bool {
        let able = |one: &Device, other: &Device| one.can_reach(other).unwrap_or(false);
        if !able(self, peer) || !able(peer, self) {
            return false;
        }
        let reached = self.reach(peer).and_then(|()| peer.reach(self));
        if let Err(error) = &reached {
            tracing::warn!(gpu = self.index(), peer = peer.index(), reason = %error, "peer access is refused");
        }
        reached.is_ok()
    }

    /// What another process opens an allocation by.
    pub(crate) fn export(&self, start: Address) -> Result<abi::IpcHandle, CudaError> {
        let _current = self.enter()?;
        let mut handle = abi::IpcHandle([0; 64]);
        // SAFETY: the result is written to a valid place; the driver checks the address.
        unsafe { call!(self.driver, ipc_export(&mut handle, start)) }?;
        Ok(handle)
    }

    /// Copies in a stream that is somebody else's.
    ///
    /// # Safety
    ///
    /// The stream is of this device's context, which is current. What holds for `cuMemcpyAsync`
    /// holds for the ranges.
    pub unsafe fn copy_in(
        &self,
        stream: abi::StreamHandle,
        from: Address,
        to: Address,
        bytes: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: by this function's contract.
        unsafe { call!(self.driver, copy_async(to, from, bytes as abi::Size, stream)) }
    }

    /// What tells a stream of its context, which is current, from every other one.
    pub(crate) fn id_of(&self, stream: abi::StreamHandle) -> Result<StreamId, CudaError> {
        let mut number = 0;
        // SAFETY: the result is written to a valid place; the stream is the caller's.
        unsafe { call!(self.driver, stream_id(stream, &mut number)) }?;
        Ok(StreamId { device: self.index(), number })
    }

    /// Its context is reset from now on, and with it goes all that it had: nothing of that is given
    /// back any more.
    pub(crate) fn is_reset(&self) {
        self.is_gone.store(true, Ordering::Release);
        access::forget(self.context);
    }

    /// Makes its context current on this thread; what was current before is again when the guard is
    /// dropped.
    pub fn enter(&self) -> Result<Current<'_>, CudaError> {
        if self.is_gone.load(Ordering::Acquire) {
            return Err(CudaError::gone());
        }
        // SAFETY: the context is retained for as long as the device lives.
        unsafe { call!(self.driver, context_push(self.context)) }?;
        Ok(Current { device: self, _thread: std::marker::PhantomData })
    }
}

/// What is known of the GPU without its context.
impl Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread. It fails only when the driver has shut down.
        unsafe { (self.device.driver.table().context_pop)(&mut popped) };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`, released once. It fails only when the driver has shut down.
        unsafe { (self.driver.table().primary_context_release)(self.id) };
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("index", &self.index()).finish_non_exhaustive()
    }
}

/// What tells a stream from every other one of the process, the past ones too. A handle does not:
/// those of default streams mean another stream on every GPU and thread, and one that was destroyed
/// comes back as another stream's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId {
    device: u16,
    number: u64,
}

/// A stream that waits for nothing unless told to. Work in it runs in order.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    handle: abi::StreamHandle,
}

// SAFETY: streams may be used from any thread; the driver's functions are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of the least urgent priority for its kernels: the engine's own work goes first.
    pub fn new(device: &Arc<Device>) -> Result<Stream, CudaError> {
        Stream::with_priority(device, |least, _| least)
    }

    /// A stream of the most urgent priority, for short kernels that the engine's own work waits
    /// for.
    pub fn urgent(device: &Arc<Device>) -> Result<Stream, CudaError> {
        Stream::with_priority(device, |_, most| most)
    }

    fn with_priority(device: &Arc<Device>, choose: fn(i32, i32) -> i32) -> Result<Stream, CudaError> {
        let _current = device.enter()?;
        let (mut least, mut most, mut handle) = (0, 0, std::ptr::null_mut());
        // SAFETY: results are written to valid places; the device's context is current.
        unsafe {
            call!(device.driver, context_priorities(&mut least, &mut most))?;
            let priority = choose(least, most);
            call!(device.driver, stream_create(&mut handle, abi::STREAM_NON_BLOCKING, priority))?;
        }
        Ok(Stream { device: Arc::clone(device), handle })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn handle(&self) -> abi::StreamHandle {
        self.handle
    }

    /// Has everything put into the stream from now on wait for the event's latest record.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        event.hold(self.handle)
    }

    /// Copies between addresses of host and device memory that the stream's device reaches.
    ///
    /// # Safety
    ///
    /// Both ranges stay valid until the copy is done, and nothing else touches the target, or
    /// writes the source, until then.
    pub unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: by this function's contract; the caller has entered the device.
        unsafe { self.device.copy_in(self.handle, from, to, bytes) }
    }

    /// Whether everything put into it is done. Nobody waits.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let _current = self.device.enter()?;
        // SAFETY: the stream lives.
        match unsafe { (self.device.driver.table().stream_query)(self.handle) } {
            abi::NOT_READY => Ok(false),
            status => self.device.driver.check(Table::stream_query, status).map(|()| true),
        }
    }

    /// Waits until everything put into it is done, whatever is current: the driver refuses it where
    /// nothing is.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        // SAFETY: the stream lives.
        unsafe { call!(self.device.driver, stream_synchronize(self.handle)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: created by `new`, destroyed once. It fails only when the driver has shut down or
        // the context is lost.
        unsafe { (self.device.driver.table().stream_destroy)(self.handle) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    handle: abi::EventHandle,
}

// SAFETY: events may be used from any thread; the driver's functions are thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event without a time stamp. Until it is recorded it counts as passed.
    pub fn new(device: &Arc<Device>) -> Result<Event, CudaError> {
        Event::with(device, abi::EVENT_DISABLE_TIMING)
    }

    /// The same, for which [`synchronize`](Event::synchronize) sleeps.
    pub fn to_sleep_for(device: &Arc<Device>) -> Result<Event, CudaError> {
        Event::with(device, abi::EVENT_DISABLE_TIMING | abi::EVENT_BLOCKING_SYNC)
    }

    /// An event with a time stamp, for [`since`](Event::since).
    pub fn with_time(device: &Arc<Device>) -> Result<Event, CudaError> {
        Event::with(device, abi::EVENT_BLOCKING_SYNC)
    }

    fn with(device: &Arc<Device>, flags: libc::c_uint) -> Result<Event, CudaError> {
        let _current = device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the result is written to a valid place; the device's context is current.
        unsafe { call!(device.driver, event_create(&mut handle, flags)) }?;
        Ok(Event { device: Arc::clone(device), handle })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        unsafe { call!(self.device.driver, event_synchronize(self.handle)) }
    }

    /// How long after another one it was passed. Both are made [with a time](Event::with_time) and
    /// have been passed; nothing if the other one came later.
    pub fn since(&self, earlier: &Event) -> Result<std::time::Duration, CudaError> {
        let mut ms = 0.0;
        // SAFETY: the result is written to a valid place; both events live.
        unsafe { call!(self.device.driver, event_elapsed(&mut ms, earlier.handle, self.handle)) }?;
        Ok(std::time::Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    pub fn handle(&self) -> abi::EventHandle {
        self.handle
    }

    /// Records it behind everything that is in the stream now.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.record_in(stream.handle)
    }

    /// As [`record`](Event::record), in a stream of somebody else's. The driver refuses one of
    /// another context.
    pub(crate) fn record_in(&self, stream: abi::StreamHandle) -> Result<(), CudaError> {
        // SAFETY: the event lives; the driver checks that the stream is of its context.
        unsafe { call!(self.device.driver, event_record(self.handle, stream)) }
    }

    /// Has everything put from now on into a stream of somebody else's wait for the latest record.
    pub(crate) fn hold(&self, stream: abi::StreamHandle) -> Result<(), CudaError> {
        // SAFETY: the event lives; the driver checks the stream.
        unsafe { call!(self.device.driver, stream_wait_event(stream, self.handle, 0)) }
    }

    /// Records it behind everything that is in a stream of somebody else's now.
    ///
    /// # Safety
    ///
    /// The stream is one of this device's primary context and lives; that context is current, if it
    /// is a default stream.
    pub unsafe fn record_behind(&self, stream: abi::StreamHandle) -> Result<(), CudaError> {
        self.record_in(stream)
    }

    /// Has everything put from now on into a stream of somebody else's wait for the latest record.
    ///
    /// # Safety
    ///
    /// The stream lives; its context is current, if it is a default stream.
    pub unsafe fn come_before(&self, stream: abi::StreamHandle) -> Result<(), CudaError> {
        self.hold(stream)
    }

    pub fn is_passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        match unsafe { (self.device.driver.table().event_query)(self.handle) } {
            abi::NOT_READY => Ok(false),
            status => self.device.driver.check(Table::event_query, status).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.is_gone.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: created by `new`, destroyed once. It fails only when the driver has shut down or
        // the context is lost.
        unsafe { (self.device.driver.table().event_destroy)(self.handle) };
    }
}

#[derive(Debug)]
pub struct DeviceMemory {
    device: Arc<Device>,
    address: Address,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates memory that peers may reach and other processes may open.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<DeviceMemory, CudaError> {
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: the result is written to a valid place; the device's context is current.
        unsafe { call!(device.driver, memory_allocate(&mut address, bytes as abi::Size)) }?;
        Ok(DeviceMemory { device: Arc::clone(device), address, bytes })
    }

    pub fn address(&self) -> Address {
        self.address
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What another process opens it by.
    pub fn export(&self) -> Result<abi::IpcHandle, CudaError> {
        self.device.export(self.address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: allocated by `new`, freed once.
        unsafe { (self.device.driver.table().memory_free)(self.address) };
    }
}

/// Memory of a GPU that another process owns.
#[derive(Debug)]
pub struct ForeignMemory {
    device: Arc<Device>,
    address: Address,
}

impl ForeignMemory {
    /// Opens memory of another process for `device`. Its own GPU need not be visible here.
    pub fn open(device: &Arc<Device>, handle: abi::IpcHandle) -> Result<ForeignMemory, CudaError> {
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: the result is written to a valid place; the device's context is current.
        unsafe { call!(device.driver, ipc_open(&mut address, handle, abi::IPC_LAZY_ENABLE_PEER_ACCESS)) }?;
        Ok(ForeignMemory { device: Arc::clone(device), address })
    }

    /// The first byte, in this process.
    pub fn address(&self) -> Address {
        self.address
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: opened by `open`, closed once. It fails where the owner is gone; the mapping goes
        // with it.
        unsafe { (self.device.driver.table().ipc_close)(self.address) };
    }
}

/// Pinned host memory that every GPU reaches, for small tables. Larger memory comes from a pool.
#[derive(Debug)]
pub struct HostMemory {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the allocation is owned and never moves.
unsafe impl Send for HostMemory {}
// SAFETY: as above; it gives out an address only, never a reference.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates pinned memory. The device is only whose context asks for it.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<HostMemory, CudaError> {
        let _current = device.enter()?;
        let mut start = std::ptr::null_mut();
        let flags = abi::HOST_REGISTER_PORTABLE | abi::HOST_REGISTER_DEVICEMAP;
        // SAFETY: the result is written to a valid place; the device's context is current.
        unsafe { call!(device.driver, host_allocate(&mut start, bytes, flags)) }?;
        Ok(HostMemory { device: Arc::clone(device), start: start.cast(), bytes })
    }

    /// The first byte, for the CPU and for every GPU.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: allocated by `new`, freed once.
        unsafe { (self.device.driver.table().host_free)(self.start.cast()) };
    }
}
