//! GPUs and contexts: which one, made current for a moment and given back.

use std::ffi::{CStr, c_char, c_int};

use super::driver::{Driver, Handle, SUCCESS};
use crate::backend::BackendKind;
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::gpu::PciAddress;
use crate::sys::num::u64_of;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` and its value `OWNER`.
const ATTRIBUTE_WRITES_ORDERING: c_int = 118;
const WRITES_ORDERED_FOR_OWNER: c_int = 100;
/// `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`.
const ATTRIBUTE_MPS: c_int = 133;

/// A GPU of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) driver: &'static Driver,
    pub(crate) ordinal: usize,
    handle: c_int,
}

impl Device {
    /// How many there are.
    pub(crate) fn count(driver: &'static Driver) -> Result<usize> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        driver.check("list GPUs", "cuDeviceGetCount", unsafe { driver.device_count(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn new(driver: &'static Driver, ordinal: usize) -> Result<Self> {
        let count = Self::count(driver)?;
        if ordinal >= count {
            let cause = format!("there is no GPU {ordinal}: this process sees {count}");
            return Err(Error::new("open GPU", ErrorKind::NoDevice, cause)
                .remedy("choose another ordinal, or check CUDA_VISIBLE_DEVICES"));
        }
        let mut handle = 0;
        let index = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: `handle` outlives the call.
        driver.check("open GPU", "cuDeviceGet", unsafe { driver.device(&mut handle, index) })?;
        Ok(Self { driver, ordinal, handle })
    }

    /// The GPU of the calling thread's context, or GPU 0.
    pub(crate) fn current_or_first(driver: &'static Driver) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: `handle` outlives the call, which fails where there is no context.
        let ordinal = if unsafe { driver.context_device(&mut handle) } == SUCCESS { handle } else { 0 };
        Self::new(driver, usize::try_from(ordinal).unwrap_or(0))
    }

    pub(crate) fn handle(&self) -> c_int {
        self.handle
    }

    pub(crate) fn attribute(&self, attribute: c_int) -> Option<c_int> {
        let mut value = 0;
        // SAFETY: `value` outlives the call; an unknown attribute is an error code.
        let code = unsafe { self.driver.device_attribute(&mut value, attribute, self.handle) };
        (code == SUCCESS).then_some(value)
    }

    /// Whether writes over PCIe become visible to the GPU's own kernels in order, without a flush call.
    pub(crate) fn orders_writes(&self) -> bool {
        self.attribute(ATTRIBUTE_WRITES_ORDERING).is_some_and(|order| order >= WRITES_ORDERED_FOR_OWNER)
    }

    /// Makes earlier writes over PCIe visible to this GPU's kernels.
    pub(crate) fn flush_writes(&self) -> Result<()> {
        let primary = self.retain_primary()?;
        let _entered = primary.enter()?;
        // SAFETY: target 0 is the current context, scope 100 its own GPU.
        let code = unsafe { self.driver.flush_rdma_writes(0, 100) };
        self.driver.check("publish", "cuFlushGPUDirectRDMAWrites", code)
    }

    /// Refuses what was never tried with a backend that maps by itself, by name.
    pub(crate) fn refuse_partitions(&self, backend: BackendKind) -> Result<()> {
        if self.name()?.contains(" MIG ") {
            let cause = format!("the GPU is a MIG partition, on which backend '{backend}' has not been tried");
            return Err(Error::new("pin", ErrorKind::UnsupportedFeature(Feature::Mig), cause).remedy("use a whole GPU"));
        }
        if self.attribute(ATTRIBUTE_MPS).is_some_and(|on| on != 0) {
            return Err(Error::new(
                "pin",
                ErrorKind::UnsupportedFeature(Feature::Mps),
                "the process runs under MPS, whose server owns the memory",
            )
            .remedy("start the process without MPS (unset CUDA_MPS_PIPE_DIRECTORY, or stop the control daemon)"));
        }
        Ok(())
    }

    /// By which other programming interfaces name the same GPU.
    #[cfg(feature = "vulkan")]
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: CUuuid is 16 bytes; the place outlives the call.
        let code = unsafe { self.driver.device_uuid(&mut uuid, self.handle) };
        self.driver.check("open GPU", "cuDeviceGetUuid", code)?;
        Ok(uuid)
    }

    fn text(
        &self,
        call: &'static str,
        ask: impl FnOnce(&Driver, *mut c_char, c_int, c_int) -> c_int,
    ) -> Result<String> {
        let mut text: [c_char; 128] = [0; 128];
        // The last byte stays 0 whatever the call writes.
        let code = ask(self.driver, text.as_mut_ptr(), 127, self.handle);
        self.driver.check("open GPU", call, code)?;
        // SAFETY: the array outlives the reference and ends in a 0.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub(crate) fn name(&self) -> Result<String> {
        // SAFETY: `text` hands over a buffer of the length it states.
        self.text("cuDeviceGetName", |driver, text, len, device| unsafe { driver.device_name(text, len, device) })
    }

    pub(crate) fn pci(&self) -> Result<PciAddress> {
        // SAFETY: as in `name`.
        self.text("cuDeviceGetPCIBusId", |driver, text, len, device| unsafe { driver.device_pci(text, len, device) })?
            .parse()
    }

    pub(crate) fn bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` outlives the call.
        let code = unsafe { self.driver.device_bytes(&mut bytes, self.handle) };
        self.driver.check("open GPU", "cuDeviceTotalMem", code)?;
        Ok(u64_of(bytes))
    }

    pub(crate) fn retain_primary(&self) -> Result<Primary> {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call.
        let code = unsafe { self.driver.primary_retain(&mut context, self.handle) };
        self.driver.check("open GPU", "cuDevicePrimaryCtxRetain", code)?;
        Ok(Primary { device: *self, context })
    }
}

/// A retained primary context.
#[derive(Debug)]
pub(crate) struct Primary {
    pub(crate) device: Device,
    context: Handle,
}

// SAFETY: contexts may be used from any thread; this one is only ever pushed and popped.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Primary {
    pub(crate) fn enter(&self) -> Result<Entered> {
        Entered::new(self.device.driver, self.context)
    }

    /// Makes it current and leaves it so.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained while `self` lives.
        let code = unsafe { self.device.driver.context_set(self.context) };
        self.device.driver.check("make current", "cuCtxSetCurrent", code)
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain_primary`.
        let _ = unsafe { self.device.driver.primary_release(self.device.handle) };
    }
}

/// A context made current on this thread until dropped; the thread's own comes back then.
#[derive(Debug)]
pub(crate) struct Entered {
    driver: &'static Driver,
    /// Contexts are current per thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Entered {
    pub(crate) fn new(driver: &'static Driver, context: Handle) -> Result<Self> {
        // SAFETY: the caller's context is live; a dead one is an error code.
        let code = unsafe { driver.context_push(context) };
        driver.check("enter context", "cuCtxPushCurrent", code)?;
        Ok(Self { driver, _not_send: std::marker::PhantomData })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what `new` pushed; `popped` outlives the call.
        let _ = unsafe { self.driver.context_pop(&mut popped) };
    }
}
