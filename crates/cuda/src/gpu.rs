//! A GPU as the driver describes it. Asking costs nothing: no context is made, so a GPU whose
//! memory is full can be asked too.

use crate::driver::{CudaError, Driver, abi};
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
    /// The GPU of an ordinal.
    pub fn find(driver: &'static Driver, index: u16) -> Result<Gpu, CudaError> {
        let mut id = 0;
        // SAFETY: the result is written to a valid place.
        driver.check("cuDeviceGet", unsafe { (driver.table().device_get)(&mut id, c_int::from(index)) })?;
        Ok(Gpu { driver, id, index })
    }

    /// GPUs that this process sees.
    pub fn count(driver: &Driver) -> Result<u16, CudaError> {
        let mut count = 0;
        // SAFETY: the count is written to a valid place.
        driver.check("cuDeviceGetCount", unsafe { (driver.table().device_count)(&mut count) })?;
        Ok(u16::try_from(count).unwrap_or(0))
    }

    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Its ordinal in this process.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// A `CUdevice_attribute`.
    pub fn attribute(&self, attribute: c_int) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the value is written to a valid place.
        let status = unsafe { (self.driver.table().device_attribute)(&mut value, attribute, self.id) };
        self.driver.check("cuDeviceGetAttribute", status)?;
        Ok(value)
    }

    /// Whether this process has a primary context on it.
    pub fn has_context(&self) -> Result<bool, CudaError> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both values are written to valid places.
        let status = unsafe { (self.driver.table().primary_context_state)(self.id, &mut flags, &mut active) };
        self.driver.check("cuDevicePrimaryCtxGetState", status)?;
        Ok(active != 0)
    }

    /// The product's name.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0; 128];
        // SAFETY: the buffer is as long as stated.
        let status = unsafe { (self.driver.table().device_name)(name.as_mut_ptr(), 128, self.id) };
        self.driver.check("cuDeviceGetName", status)?;
        Ok(text(&name))
    }

    /// The PCI address, in the form in which sysfs has it.
    pub fn bus_id(&self) -> Result<String, CudaError> {
        let mut name = [0; 32];
        // SAFETY: the buffer is as long as stated.
        let status = unsafe { (self.driver.table().device_bus_id)(name.as_mut_ptr(), 32, self.id) };
        self.driver.check("cuDeviceGetPCIBusId", status)?;
        Ok(text(&name).to_lowercase())
    }

    /// What names the GPU in every process, whatever its ordinal there.
    pub fn uuid(&self) -> Result<[u8; 16], CudaError> {
        let mut uuid = abi::Uuid::default();
        // SAFETY: the value is written to a valid place.
        let status = unsafe { (self.driver.table().device_uuid)(&mut uuid, self.id) };
        self.driver.check("cuDeviceGetUuid", status)?;
        Ok(uuid.0)
    }

    pub fn memory_bytes(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: the value is written to a valid place.
        let status = unsafe { (self.driver.table().device_total_memory)(&mut bytes, self.id) };
        self.driver.check("cuDeviceTotalMem", status)?;
        Ok(bytes as u64)
    }

    /// Whether this GPU can read and write the memory of another over NVLink or PCIe.
    pub fn can_reach(&self, other: &Gpu) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: the value is written to a valid place.
        let status = unsafe { (self.driver.table().device_can_access_peer)(&mut can, self.id, other.id) };
        self.driver.check("cuDeviceCanAccessPeer", status)?;
        Ok(can != 0)
    }

    /// How fast the way to the memory of another is, as the driver ranks it among all pairs of this
    /// host.
    pub fn rank_to(&self, other: &Gpu) -> Result<i32, CudaError> {
        let (mut rank, asked) = (0, abi::P2P_PERFORMANCE_RANK);
        // SAFETY: the value is written to a valid place.
        let status =
            unsafe { (self.driver.table().device_p2p_attribute)(&mut rank, asked, self.id, other.id) };
        self.driver.check("cuDeviceGetP2PAttribute", status)?;
        Ok(rank)
    }
}

fn text(bytes: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into()).unwrap_or_default()
}
