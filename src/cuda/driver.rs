//! The calls of the CUDA driver that this library makes, resolved from `libcuda.so.1` at run time.
//!
//! Results stay integers: a newer driver may return codes that no enum of ours lists. Names and meanings are those of
//! the CUDA driver API reference.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{Error, ErrorKind, Feature, Result, chain};
use crate::range::GpuAddr;

/// A CUDA context, stream or event: opaque.
pub(crate) type Handle = *mut c_void;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_NOT_READY`: an event that has not happened yet.
pub(crate) const NOT_READY: c_int = 600;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: c_uint = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

const _: () = assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12);

macro_rules! calls {
    ($($(#[$when:meta])* $name:ident = $symbol:literal ( $($arg:ident : $kind:ty),* );)*) => {
        /// One function pointer for each call.
        pub(crate) struct Driver {
            $($(#[$when])* $name: unsafe extern "C" fn($($kind),*) -> c_int,)*
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Driver {
            fn resolve(library: Library) -> Result<Self> {
                Ok(Self {
                    $($(#[$when])* $name: {
                        // SAFETY: the symbol's type is the one the CUDA driver API documents for this name.
                        let found = unsafe { library.get($symbol.as_bytes()) };
                        *found.map_err(|_| missing_symbol($symbol))?
                    },)*
                    _library: library,
                })
            }

            $(
                $(#[$when])*
                /// The driver call of this name.
                ///
                /// # Safety
                ///
                /// Arguments are as the CUDA driver API reference asks.
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
                pub(crate) unsafe fn $name(&self $(, $arg: $kind)*) -> c_int {
                    // SAFETY: the caller's duty.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

calls! {
    init = "cuInit"(flags: c_uint);
    error_name = "cuGetErrorName"(code: c_int, name: *mut *const c_char);
    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: c_int);
    device_bytes = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
    device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: c_int);
    #[cfg(feature = "vulkan")]
    device_uuid = "cuDeviceGetUuid"(uuid: *mut [u8; 16], device: c_int);
    device_pci = "cuDeviceGetPCIBusId"(text: *mut c_char, len: c_int, device: c_int);
    primary_retain = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    context_push = "cuCtxPushCurrent_v2"(context: Handle);
    context_pop = "cuCtxPopCurrent_v2"(context: *mut Handle);
    context_set = "cuCtxSetCurrent"(context: Handle);
    context_device = "cuCtxGetDevice"(device: *mut c_int);
    flush_rdma_writes = "cuFlushGPUDirectRDMAWrites"(target: c_int, scope: c_int);
    pointer_attributes = "cuPointerGetAttributes"(count: c_uint, which: *mut c_int, data: *mut *mut c_void, pointer: u64);
    ipc_handle = "cuIpcGetMemHandle"(handle: *mut [u32; 16], pointer: u64);
    mem_alloc = "cuMemAlloc_v2"(pointer: *mut u64, bytes: usize);
    mem_free = "cuMemFree_v2"(pointer: u64);
    host_alloc = "cuMemHostAlloc"(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free = "cuMemFreeHost"(pointer: *mut c_void);
    vmm_granularity = "cuMemGetAllocationGranularity"(bytes: *mut usize, prop: *const AllocationProp, option: c_int);
    vmm_create = "cuMemCreate"(handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64);
    vmm_release = "cuMemRelease"(handle: u64);
    vmm_reserve = "cuMemAddressReserve"(pointer: *mut u64, bytes: usize, align: usize, hint: u64, flags: u64);
    vmm_unreserve = "cuMemAddressFree"(pointer: u64, bytes: usize);
    vmm_map = "cuMemMap"(pointer: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    vmm_unmap = "cuMemUnmap"(pointer: u64, bytes: usize);
    vmm_access = "cuMemSetAccess"(pointer: u64, bytes: usize, access: *const AccessDesc, count: usize);
    vmm_export = "cuMemExportToShareableHandle"(out: *mut c_void, handle: u64, kind: c_int, flags: u64);
    vmm_retain = "cuMemRetainAllocationHandle"(handle: *mut u64, pointer: *mut c_void);
    vmm_properties = "cuMemGetAllocationPropertiesFromHandle"(prop: *mut AllocationProp, handle: u64);
    stream_create = "cuStreamCreateWithPriority"(stream: *mut Handle, flags: c_uint, priority: c_int);
    stream_sync = "cuStreamSynchronize"(stream: Handle);
    stream_destroy = "cuStreamDestroy_v2"(stream: Handle);
    event_destroy = "cuEventDestroy_v2"(event: Handle);
    event_create = "cuEventCreate"(event: *mut Handle, flags: c_uint);
    event_record = "cuEventRecord"(event: Handle, stream: Handle);
    event_query = "cuEventQuery"(event: Handle);
    stream_query = "cuStreamQuery"(stream: Handle);
    host_device_pointer = "cuMemHostGetDevicePointer_v2"(addr: *mut u64, pointer: *mut c_void, flags: c_uint);
    module_load = "cuModuleLoadDataEx"(module: *mut Handle, image: *const c_void, options: c_uint, which: *mut c_uint, values: *mut *mut c_void);
    module_unload = "cuModuleUnload"(module: Handle);
    module_function = "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
    function_attribute = "cuFuncGetAttribute"(value: *mut c_int, attribute: c_int, function: Handle);
    function_set_attribute = "cuFuncSetAttribute"(function: Handle, attribute: c_int, value: c_int);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(blocks: *mut c_int, function: Handle, threads: c_int, shared_bytes: usize);
    launch = "cuLaunchKernel"(function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    copy_to_device = "cuMemcpyHtoD_v2"(to: u64, from: *const c_void, bytes: usize);
    copy_to_host = "cuMemcpyDtoH_v2"(to: *mut c_void, from: u64, bytes: usize);
    copy_to_device_async = "cuMemcpyHtoDAsync_v2"(to: u64, from: *const c_void, bytes: usize, stream: Handle);
    copy_to_host_async = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: u64, bytes: usize, stream: Handle);
}

// SAFETY: function pointers and a library handle; the CUDA driver API is thread-safe.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

fn missing_symbol(symbol: &str) -> Error {
    Error::new("open", ErrorKind::NoDriver, format!("libcuda.so.1 has no {symbol}"))
        .remedy("update the NVIDIA driver to 535 or newer")
}

fn load() -> Result<Driver> {
    // SAFETY: loading NVIDIA's driver library runs its initialisers, which have no requirements.
    let library = unsafe { Library::new("libcuda.so.1") }.map_err(|error| {
        Error::new("open", ErrorKind::NoDriver, format!("libcuda.so.1 cannot be loaded: {}", chain(&error)))
            .remedy("install the NVIDIA driver, or pass its libraries into the container")
    })?;
    Driver::resolve(library)
}

impl Driver {
    /// The driver library, loaded but perhaps not initialised. Creates no context.
    pub(crate) fn loaded() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    /// The driver, initialised (`cuInit`). Creates no context.
    pub(crate) fn get() -> Result<&'static Self> {
        static READY: OnceLock<Result<()>> = OnceLock::new();
        let driver = Self::loaded()?;
        READY
            .get_or_init(|| {
                // SAFETY: cuInit takes flags 0.
                driver.check("open", "cuInit", unsafe { driver.init(0) })
            })
            .clone()
            .map(|()| driver)
    }

    /// Page-locked memory that is never freed, in the current context.
    pub(crate) fn page_locked(&self, bytes: usize) -> Result<Handle> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: the place outlives the call; flag 1 makes it page-locked for every context.
        let code = unsafe { self.host_alloc(&mut memory, bytes, 1) };
        self.check("pin", "cuMemHostAlloc", code).map(|()| memory)
    }

    /// `cuMemAlloc` in the current context.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<GpuAddr> {
        let mut addr = 0;
        // SAFETY: the place outlives the call.
        let code = unsafe { self.mem_alloc(&mut addr, bytes) };
        self.check("alloc", "cuMemAlloc", code).map(|()| GpuAddr::new(addr))
    }

    /// `cuFuncLoad`, which drivers before 550 lack.
    pub(crate) fn function_load(&self, function: Handle) -> Option<c_int> {
        type Load = unsafe extern "C" fn(Handle) -> c_int;
        // SAFETY: the symbol's type is the one the CUDA driver API documents for this name.
        let load = unsafe { self._library.get::<Load>(b"cuFuncLoad") }.ok()?;
        // SAFETY: the caller's function is one of a loaded module; a dead one is an error code.
        Some(unsafe { load(function) })
    }

    /// Turns a result code into an error that names the call.
    pub(crate) fn check(&self, op: &'static str, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(op, call, code)) }
    }

    #[cold]
    pub(crate) fn error(&self, op: &'static str, call: &'static str, code: c_int) -> Error {
        let mut name = std::ptr::null();
        // SAFETY: `name` outlives the call; on success it points to a static string.
        let named = unsafe { self.error_name(code, &mut name) } == SUCCESS && !name.is_null();
        let name = if named {
            // SAFETY: a NUL-terminated static string of the driver's.
            unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an error it does not name".to_owned()
        };
        let (kind, remedy) = match code {
            2 => (ErrorKind::OutOfMemory, Some("free GPU memory or ask for less")),
            100 | 101 => (ErrorKind::NoDevice, Some("check nvidia-smi and CUDA_VISIBLE_DEVICES")),
            // Connection to the MPS server: failed, not ready, too many clients.
            805..=809 => {
                (ErrorKind::UnsupportedFeature(Feature::Mps), Some("check the MPS control daemon, or stop it"))
            }
            34 | 35 | 802..=804 => {
                (ErrorKind::NoDriver, Some("make library and kernel module the same driver version"))
            }
            _ => (ErrorKind::Io(libc::EIO), None),
        };
        let error = Error::new(op, kind, format!("{call} returned {name}")).cuda(code);
        match remedy {
            Some(remedy) => error.remedy(remedy),
            None => error,
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver(libcuda.so.1)")
    }
}
