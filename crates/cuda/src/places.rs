//! GPUs as places of somebody else's mover: each is opened when memory of it is registered first,
//! with its PCIe link in both directions. Checks what addresses are before anything copies there.
//! Does not know who else has places on that mover, nor which paths there are.

use crate::addresses::Addresses;
use crate::device::{Device, HostMemory};
use crate::driver::abi::Address;
use crate::driver::{CudaError, Driver};
use crate::gpu::Gpu;
use crate::kernels::Kernels;
use crate::links::{Direction, PcieLink, link_spec};
use crate::open::{self, LeftOut};
use crate::poller::{Poller, Tracks};
use crate::stream_copy::{DeclineReason, context_of, pointer_range};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Backing, Closed, LinkId, MoverHandle, Place, RegionId};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// A GPU on a mover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuPlace {
    pub place: Place,
    pub to_host: LinkId,
    pub from_host: LinkId,
}

/// Why memory of a GPU is not registered.
#[derive(Debug, Error)]
pub enum NotRegistered {
    #[error("device: {device} does not exist; {count} GPUs are visible, the first is 0")]
    NoDevice { device: u16, count: u16 },
    #[error("device: {address:#x} lies on GPU {lies_on}, not on {device}")]
    OtherDevice { address: Address, device: u16, lies_on: u16 },
    #[error("address: {address:#x} is no memory of a GPU: {why}; allowed is memory of cudaMalloc")]
    Foreign { address: Address, why: &'static str },
    #[error("address: {address:#x} is of another context; allowed is memory of the GPU's primary context")]
    OtherContext { address: Address },
    #[error("bytes: 0 from {address:#x} on; at least 1 is needed")]
    Empty { address: Address },
    #[error("bytes: {bytes} from {address:#x} on reach beyond their allocation, which ends at {end:#x}")]
    TooLong { address: Address, bytes: u64, end: Address },
    #[error("device: GPU {device} cannot be used: {why}")]
    LeftOut { device: u16, why: LeftOut },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("a thread did not start: {0}")]
    Thread(#[from] std::io::Error),
    #[error(transparent)]
    Mover(#[from] Closed),
}

/// The GPUs of this process on a mover, which has to end before this is dropped.
#[derive(Debug)]
pub struct GpuPlaces {
    driver: &'static Driver,
    mover: MoverHandle,
    addresses: Arc<Addresses>,
    poller: Poller,
    opened: Mutex<HashMap<u16, Opened>>,
}

#[derive(Debug)]
struct Opened {
    kernels: Arc<Kernels>,
    place: GpuPlace,
}

impl GpuPlaces {
    pub fn new(driver: &'static Driver, mover: MoverHandle) -> Result<GpuPlaces, NotRegistered> {
        let poller = Poller::spawn(driver)?;
        Ok(GpuPlaces { driver, mover, addresses: Arc::default(), poller, opened: Mutex::default() })
    }

    /// Makes memory of a GPU a region of the mover. Opens the GPU if it is the first of it.
    ///
    /// # Safety
    ///
    /// The range stays allocated until [`forget`](GpuPlaces::forget), and its bytes are the mover's
    /// while transfers name them.
    pub unsafe fn register(
        &self,
        device: u16,
        address: Address,
        bytes: u64,
    ) -> Result<(GpuPlace, RegionId), NotRegistered> {
        let count = Gpu::count(self.driver)?;
        if device >= count {
            return Err(NotRegistered::NoDevice { device, count });
        }
        self.check(device, address, bytes)?;
        let place = self.place(device, address)?;
        let region = self.mover.register_opaque(place.place, bytes)?;
        self.addresses.insert(region, address, bytes);
        Ok((place, region))
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    pub(crate) fn tracks(&self) -> Tracks {
        self.poller.tracks()
    }

    /// A GPU of this process.
    pub(crate) fn open(&self, device: u16) -> Result<Arc<Kernels>, LeftOut> {
        if let Some(opened) = self.opened.lock().get(&device) {
            return Ok(Arc::clone(&opened.kernels));
        }
        let gpu = open::open_one(self.driver, device, true)?;
        Ok(Arc::new(Kernels::load(&gpu)?))
    }

    /// Forgets where a region lies. The mover has forgotten it.
    pub fn forget(&self, region: RegionId) {
        self.addresses.remove(region);
    }

    /// Pinned host memory. There is a GPU, whose context asks for it.
    pub fn pinned(&self, bytes: usize) -> Result<Arc<dyn Backing>, CudaError> {
        let opened = self.opened.lock();
        let device = opened.values().next().map(|opened| Arc::clone(opened.kernels.device()));
        drop(opened);
        let device = device.map_or_else(|| Device::open(self.driver, 0), Ok)?;
        Ok(Arc::new(HostMemory::new(&device, bytes)?))
    }

    /// Whether a range is memory of a GPU from its start to its end. What is mapped side by side,
    /// as by expandable segments, may be several allocations.
    fn check(&self, device: u16, address: Address, bytes: u64) -> Result<(), NotRegistered> {
        let foreign = |address| move |why| NotRegistered::Foreign { address, why: in_words(why) };
        if bytes == 0 {
            return Err(NotRegistered::Empty { address });
        }
        let mut at = address;
        let end = address.saturating_add(bytes);
        while at < end {
            let range = pointer_range(self.driver, at).map_err(foreign(at));
            let range = match range {
                Err(NotRegistered::Foreign { .. }) if at > address => {
                    return Err(NotRegistered::TooLong { address, bytes, end: at });
                }
                range => range?,
            };
            match range.device() {
                Some(lies_on) if lies_on != device => {
                    return Err(NotRegistered::OtherDevice { address: at, device, lies_on });
                }
                _ => at = range.start + range.bytes(),
            }
        }
        Ok(())
    }

    /// The place of a GPU, whose primary context has to be that of memory on it.
    fn place(&self, device: u16, address: Address) -> Result<GpuPlace, NotRegistered> {
        let mut opened = self.opened.lock();
        if let Some(opened) = opened.get(&device) {
            self.check_context(opened.kernels.device(), address)?;
            return Ok(opened.place);
        }
        let left_out = |why| NotRegistered::LeftOut { device, why };
        // Its memory is there, so this process has it.
        let gpu = open::open_one(self.driver, device, true).map_err(left_out)?;
        self.check_context(&gpu, address)?;
        let kernels = Arc::new(Kernels::load(&gpu)?);
        let [from_host, to_host] = Direction::BOTH.map(|direction| self.link(direction, &kernels));
        let place = GpuPlace { place: Place::Device(device), to_host: to_host?, from_host: from_host? };
        opened.insert(device, Opened { kernels, place });
        Ok(place)
    }

    fn check_context(&self, gpu: &Device, address: Address) -> Result<(), NotRegistered> {
        match context_of(self.driver, address)? {
            // What is mapped, and memory of pools, belongs to no context.
            context if context.is_null() || context == gpu.context() => Ok(()),
            _ => Err(NotRegistered::OtherContext { address }),
        }
    }

    fn link(&self, direction: Direction, kernels: &Arc<Kernels>) -> Result<LinkId, NotRegistered> {
        let link = PcieLink::new(direction, &self.poller.tracks(), kernels, &self.addresses)?;
        let spec = link_spec(format!("gpu{}.{}", kernels.device().index(), direction.name()));
        Ok(self.mover.add_link(spec, Box::new(link))?)
    }
}

fn in_words(why: DeclineReason) -> &'static str {
    match why {
        DeclineReason::Managed => "it is managed memory",
        DeclineReason::SameKind => "it is pinned host memory",
        _ => "the driver does not know it",
    }
}

// SAFETY: the allocation lives as long as the value, is readable and writable, and neither moves
// nor resizes; it gives out an address only.
unsafe impl Backing for HostMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.start()
    }

    fn len(&self) -> usize {
        self.bytes()
    }
}
