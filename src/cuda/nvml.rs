//! Facts that only NVML tells: BAR1 use, the PCIe link, the driver's version, confidential computing.
//!
//! Asked on error paths and by tools, never to pin or copy. Names and structures are those of the NVML API reference.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::gpu::{Bar1, Link, PciAddress};

type Device = *mut c_void;
type AskNumber = unsafe extern "C" fn(Device, *mut c_uint) -> c_int;

/// `nvmlBAR1Memory_t`.
#[repr(C)]
#[derive(Default)]
struct Bar1Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlConfComputeSystemState_t`.
#[repr(C)]
#[derive(Default)]
struct ConfidentialState {
    environment: c_uint,
    feature: c_uint,
    dev_tools: c_uint,
}

/// NVML, initialised.
#[derive(Debug)]
pub(crate) struct Nvml {
    library: Library,
}

impl Nvml {
    /// `None` where the library is missing or does not start.
    pub(crate) fn get() -> Option<&'static Self> {
        static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
        NVML.get_or_init(|| {
            // SAFETY: NVIDIA's management library; its initialisers have no requirements.
            let library = unsafe { Library::new("libnvidia-ml.so.1") }.ok()?;
            let nvml = Self { library };
            let init = nvml.symbol::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")?;
            // SAFETY: takes nothing.
            (unsafe { init() } == 0).then_some(nvml)
        })
        .as_ref()
    }

    fn symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        // SAFETY: each caller names the type that the NVML reference documents for the symbol.
        unsafe { self.library.get::<T>(name.to_bytes_with_nul()) }.ok().map(|found| *found)
    }

    fn device(&self, pci: PciAddress) -> Option<Device> {
        type Find = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
        let find = self.symbol::<Find>(c"nvmlDeviceGetHandleByPciBusId_v2")?;
        let text = CString::new(pci.to_string()).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a NUL-terminated string and a place, both outliving the call.
        (unsafe { find(text.as_ptr(), &mut device) } == 0).then_some(device)
    }

    pub(crate) fn bar1(&self, pci: PciAddress) -> Option<Bar1> {
        type Ask = unsafe extern "C" fn(Device, *mut Bar1Memory) -> c_int;
        let ask = self.symbol::<Ask>(c"nvmlDeviceGetBAR1MemoryInfo")?;
        let mut memory = Bar1Memory::default();
        let device = self.device(pci)?;
        // SAFETY: the device is NVML's own and the place outlives the call.
        let code = unsafe { ask(device, &mut memory) };
        (code == 0).then_some(Bar1 { total_bytes: memory.total, used_bytes: memory.used })
    }

    pub(crate) fn link(&self, pci: PciAddress) -> Option<Link> {
        let device = self.device(pci)?;
        let number = |name: &CStr| {
            let ask = self.symbol::<AskNumber>(name)?;
            let mut value = 0;
            // SAFETY: as in `bar1`.
            (unsafe { ask(device, &mut value) } == 0).then_some(value)
        };
        Some(Link {
            generation: number(c"nvmlDeviceGetCurrPcieLinkGeneration")?,
            width: number(c"nvmlDeviceGetCurrPcieLinkWidth")?,
            max_generation: number(c"nvmlDeviceGetMaxPcieLinkGeneration")?,
            max_width: number(c"nvmlDeviceGetMaxPcieLinkWidth")?,
        })
    }

    pub(crate) fn driver_version(&self) -> Option<String> {
        type Ask = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        let ask = self.symbol::<Ask>(c"nvmlSystemGetDriverVersion")?;
        let mut text: [c_char; 96] = [0; 96];
        // SAFETY: the length is one less than the place has, so it stays terminated.
        if unsafe { ask(text.as_mut_ptr(), 95) } != 0 {
            return None;
        }
        // SAFETY: terminated, and outlives the reference.
        Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// The CUDA version that the driver supports, major and minor.
    #[cfg(feature = "tools")]
    pub(crate) fn cuda_version(&self) -> Option<(u32, u32)> {
        type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
        let ask = self.symbol::<Ask>(c"nvmlSystemGetCudaDriverVersion_v2")?;
        let mut version = 0;
        // SAFETY: the place outlives the call.
        let code = unsafe { ask(&mut version) };
        let version = u32::try_from(version).ok().filter(|_| code == 0)?;
        Some((version / 1000, version % 1000 / 10))
    }

    /// Whether the machine's GPUs run in confidential-computing mode.
    pub(crate) fn confidential(&self) -> bool {
        type Ask = unsafe extern "C" fn(*mut ConfidentialState) -> c_int;
        let Some(ask) = self.symbol::<Ask>(c"nvmlSystemGetConfComputeState") else { return false };
        let mut state = ConfidentialState::default();
        // SAFETY: the place outlives the call.
        let code = unsafe { ask(&mut state) };
        code == 0 && state.feature != 0
    }
}
