//! A GPU as the driver describes it. Asking costs nothing: no context is made, so a GPU whose
//! memory is full can be asked too.

use crate::driver::{CudaError, Driver, abi, call};
use libc::c_int;
use std::ffi::CStr;

/// A GPU that this process sees.
#[derive(Debug, Clone, Copy)]
pub struct Gpu {
    pub(crate) driver: &'static Driver,
    pub(crate) id: abi::DeviceId,
    index: u16,
}

impl Gpu {
    pub fn find(driver: &'static Driver, index: u16) -> Result<Gpu, CudaError> {
        // SAFETY: the result is written to a valid place.
        let id = written(|id| unsafe { call!(driver, device_get(id, c_int::from(index))) })?;
        Ok(Gpu { driver, id, index })
    }

    pub fn count(driver: &Driver) -> Result<u16, CudaError> {
        // SAFETY: the count is written to a valid place.
        let count = written(|count| unsafe { call!(driver, device_count(count)) })?;
        Ok(u16::try_from(count).unwrap_or(0))
    }

    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub fn index(&self) -> u16 {
        self.index
    }

    /// A `CUdevice_attribute`.
    pub fn attribute(&self, attribute: c_int) -> Result<i32, CudaError> {
        // SAFETY: the value is written to a valid place.
        written(|value| unsafe { call!(self.driver, device_attribute(value, attribute, self.id)) })
    }

    /// Whether this process has a primary context on it.
    pub fn has_context(&self) -> Result<bool, CudaError> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both values are written to valid places.
        unsafe { call!(self.driver, primary_context_state(self.id, &mut flags, &mut active)) }?;
        Ok(active != 0)
    }

    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0; 128];
        // SAFETY: the buffer is as long as stated.
        unsafe { call!(self.driver, device_name(name.as_mut_ptr(), 128, self.id)) }?;
        Ok(text(&name))
    }

    /// Whether it is an instance of a partitioned GPU (MIG). The driver says so in its name alone,
    /// as "NVIDIA H100 80GB HBM3 MIG 1g.10gb". Instances reach no other GPU's memory, nor any
    /// theirs.
    pub fn is_part(&self) -> Result<bool, CudaError> {
        Ok(self.name()?.contains(" MIG "))
    }

    /// The PCI address, in the form in which sysfs has it.
    pub fn bus_id(&self) -> Result<String, CudaError> {
        let mut name = [0; 32];
        // SAFETY: the buffer is as long as stated.
        unsafe { call!(self.driver, device_bus_id(name.as_mut_ptr(), 32, self.id)) }?;
        Ok(text(&name).to_lowercase())
    }

    /// What names the GPU in every process, whatever its ordinal there.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        // SAFETY: the value is written to a valid place.
        let uuid = written(|uuid: &mut abi::Uuid| unsafe { call!(self.driver, device_uuid(uuid, self.id)) })?;
        Ok(uuid.0)
    }

    pub fn memory_bytes(&self) -> Result<u64, CudaError> {
        // SAFETY: the value is written to a valid place.
        let bytes = written(|bytes| unsafe { call!(self.driver, device_total_memory(bytes, self.id)) })?;
        Ok(bytes as u64)
    }

    /// Whether this GPU can read and write the memory of another over NVLink or PCIe.
    pub fn can_reach(&self, other: &Gpu) -> Result<bool, CudaError> {
        // SAFETY: the value is written to a valid place.
        let can =
            written(|can| unsafe { call!(self.driver, device_can_access_peer(can, self.id, other.id)) })?;
        Ok(can != 0)
    }

    /// How fast the way to the memory of another is, as the driver ranks it among all pairs of this
    /// host.
    pub fn rank_to(&self, other: &Gpu) -> Result<i32, CudaError> {
        let asked = abi::P2P_PERFORMANCE_RANK;
        // SAFETY: the value is written to a valid place.
        written(|rank| unsafe { call!(self.driver, device_p2p_attribute(rank, asked, self.id, other.id)) })
    }
}

/// What a call writes.
fn written<T: Default>(call: impl FnOnce(&mut T) -> Result<(), CudaError>) -> Result<T, CudaError> {
    let mut value = T::default();
    call(&mut value).map(|()| value)
}

fn text(bytes: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into()).unwrap_or_default()
}
