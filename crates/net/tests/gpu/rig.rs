//! Agents in this process whose memory lies on fake GPUs or in the host.

use cuda_testkit::Fake;
use forebay_cuda::device::{Device, DeviceMemory, HostMemory, Stream};
use forebay_cuda::ipc_memory::IpcMemory;
use forebay_cuda::places::GpuPlaces;
use forebay_net::{Access, Agent, AgentConfig, Descriptors, End, Op, Registration, Request, Run, Select};
use forebay_transfer::{HostBuffer, SplitMix};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Long enough for the slowest machine.
pub const LONG: Duration = Duration::from_secs(60);
/// Long enough for what should not happen to happen.
pub const WHILE: Duration = Duration::from_millis(300);

/// An agent with memory. The agent ends before what it uses.
pub struct Side {
    pub agent: Option<Agent>,
    pub registration: Registration,
    pub pinned_bytes: Arc<AtomicUsize>,
    pub memory: Where,
}

pub enum Where {
    Host(Arc<HostBuffer>),
    Gpu(Box<OnGpu>),
}

pub struct OnGpu {
    pub places: Arc<GpuPlaces>,
    pub memory: DeviceMemory,
    pub bounce: HostMemory,
    pub stream: Stream,
    pub device: Arc<Device>,
}

/// An agent whose peers are patient: frozen engines are the tests' own doing.
pub fn config(name: &str) -> AgentConfig {
    AgentConfig { progress_limit_us: 30_000_000, flows_max: 1, ..AgentConfig::named(name) }
}

impl Side {
    pub fn on_host(name: &str, bytes: usize) -> Side {
        let agent = Agent::start(config(name)).unwrap();
        let memory = Arc::new(HostBuffer::new(bytes));
        let registration = agent.register(Arc::clone(&memory) as _, Access::OPEN).unwrap();
        Side { agent: Some(agent), registration, pinned_bytes: Arc::default(), memory: Where::Host(memory) }
    }

    pub fn on_gpu(fake: &Fake, name: &str, gpu: u16, bytes: usize) -> Side {
        Side::leased_on_gpu(fake, name, gpu, bytes, Access::OPEN)
    }

    pub fn leased_on_gpu(fake: &Fake, name: &str, gpu: u16, bytes: usize, access: Access) -> Side {
        Side::with(fake, config(name), gpu, bytes, access)
    }

    /// An agent whose GPU copies to and from those of peers by itself.
    pub fn by_ipc(fake: &Fake, name: &str, gpu: u16, bytes: usize) -> Side {
        Side::leased_by_ipc(fake, name, gpu, bytes, Access::OPEN)
    }

    pub fn leased_by_ipc(fake: &Fake, name: &str, gpu: u16, bytes: usize, access: Access) -> Side {
        let config = AgentConfig { flows_max: 1, ..AgentConfig::named(name) };
        let side = Side::with(fake, config, gpu, bytes, access);
        side.agent().add_ipc(Arc::new(IpcMemory::new(&side.gpu().places))).unwrap();
        side
    }

    fn with(fake: &Fake, config: AgentConfig, gpu: u16, bytes: usize, access: Access) -> Side {
        let agent = Agent::start(config).unwrap();
        let device = Device::open(fake.driver, gpu).unwrap();
        let memory = DeviceMemory::new(&device, bytes as u64).unwrap();
        let places = Arc::new(GpuPlaces::new(fake.driver, agent.mover().clone()).unwrap());
        // SAFETY: the memory is dropped after the agent.
        let (place, region) = unsafe { places.register(gpu, memory.address(), bytes as u64) }.unwrap();
        let pinned_bytes = Arc::<AtomicUsize>::default();
        let (own, counted) = (Arc::clone(&places), Arc::clone(&pinned_bytes));
        let pinned = Arc::new(move |bytes| {
            counted.fetch_add(bytes, Ordering::Relaxed);
            own.pinned(bytes).map_err(|error| error.to_string())
        });
        let known =
            forebay_net::Device { place: place.place, to_host: place.to_host, from_host: place.from_host };
        agent.add_device(known, pinned).unwrap();
        let what = (region, memory.address(), bytes as u64);
        let registration = agent.register_device(place.place, what, access).unwrap();
        let (bounce, stream) = (HostMemory::new(&device, bytes).unwrap(), Stream::new(&device).unwrap());
        let memory = Where::Gpu(Box::new(OnGpu { places, memory, bounce, stream, device }));
        Side { agent: Some(agent), registration, pinned_bytes, memory }
    }

    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub fn gpu(&self) -> &OnGpu {
        match &self.memory {
            Where::Gpu(gpu) => gpu,
            Where::Host(_) => panic!("it is in host memory"),
        }
    }

    /// Bytes that came from or went to the only peer over a path.
    pub fn moved(&self, path: &str) -> u64 {
        let stats = self.agent().stats();
        stats[0].counts.paths.get(path).map_or(0, |path| path.moved_bytes)
    }

    pub fn fill(&self, seed: u64) -> Vec<u8> {
        let len = self.registration.bytes() as usize;
        let mut dice = SplitMix(seed);
        let noise: Vec<u8> = (0..len / 8 + 1).flat_map(|_| dice.draw().to_le_bytes()).take(len).collect();
        match &self.memory {
            Where::Host(memory) => assert!(memory.write(0, &noise)),
            Where::Gpu(gpu) => gpu.write(&noise),
        }
        noise
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut read = vec![0; self.registration.bytes() as usize];
        match &self.memory {
            Where::Host(memory) => assert!(memory.read(0, &mut read)),
            Where::Gpu(gpu) => gpu.read(&mut read),
        }
        read
    }

    pub fn knows(&self, other: &Side) {
        self.agent().add_peer(&other.agent().metadata()).unwrap();
    }

    /// A request for the first `count` blocks here and there, in an order of its own there.
    pub fn request(&self, op: Op, other: &Side, block: u64, count: u64) -> Request {
        self.request_at(op, (other.agent().name(), other.registration.base()), block, count)
    }

    /// The same of a peer's memory that begins there.
    pub fn request_at(&self, op: Op, (name, there): (&str, u64), block: u64, count: u64) -> Request {
        let list = |base| Descriptors::from_runs([Run { address: base, len: block, count, stride: block }]);
        let agent = self.agent();
        let local = agent.prepare_local(&list(self.registration.base()).unwrap()).unwrap();
        let remote = agent.prepare_remote(name, &list(there).unwrap()).unwrap();
        let backwards = Select::Indices((0..count as u32).rev().collect());
        agent.request(op, (&local, Select::All), (&remote, backwards), None, None).unwrap()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        drop(self.agent.take());
    }
}

impl OnGpu {
    fn write(&self, bytes: &[u8]) {
        // SAFETY: the memory is as long, and no copy of it is under way.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.bounce.start(), bytes.len()) };
        self.copy(self.bounce.start() as u64, self.memory.address(), bytes.len());
    }

    fn read(&self, bytes: &mut [u8]) {
        self.copy(self.memory.address(), self.bounce.start() as u64, bytes.len());
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.bounce.start(), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) {
        let _current = self.device.enter().unwrap();
        // SAFETY: both are as long, and nobody else uses them.
        unsafe { self.stream.copy(from, to, bytes as u64) }.unwrap();
        self.stream.synchronize().unwrap();
    }
}

pub fn post(request: &Request) -> mpsc::Receiver<End> {
    let (sender, receiver) = mpsc::channel();
    request.post(move |end| sender.send(end).unwrap()).unwrap();
    receiver
}

pub fn run(request: &Request) -> End {
    post(request).recv_timeout(LONG).unwrap()
}

/// What `there` has after `here`'s blocks have gone there backwards.
pub fn backwards(bytes: &[u8], block: usize, count: usize) -> Vec<u8> {
    bytes.chunks_exact(block).take(count).rev().flatten().copied().collect()
}
