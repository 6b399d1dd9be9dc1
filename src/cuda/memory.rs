//! Device memory of our own, in both ways in which programs allocate it.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Mutex;

use super::context::{Device, Primary};
use super::driver::{AccessDesc, AllocationProp, Driver, LOCATION_DEVICE, Location};
use super::transfer::Lane;
use crate::backend::{Allocation, Allocator};
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::range::GpuAddr;
use crate::sys::num::u64_of;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;
const POSIX_FD_KIND: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;

/// A `cuMemCreate` handle, released on drop. The memory lives on while it is mapped or exported.
#[derive(Debug)]
pub(crate) struct VmmHandle {
    driver: &'static Driver,
    handle: u64,
}

impl VmmHandle {
    /// The handle behind a mapped address; `None` where the address is not `cuMemCreate` memory.
    pub(crate) fn behind(driver: &'static Driver, addr: GpuAddr) -> Option<Self> {
        let mut handle = 0;
        let pointer = std::ptr::without_provenance_mut(crate::sys::num::usize_of(addr.raw()));
        // SAFETY: `handle` outlives the call; an address of another kind is an error code.
        let code = unsafe { driver.vmm_retain(&mut handle, pointer) };
        (code == super::driver::SUCCESS).then_some(Self { driver, handle })
    }

    /// The number that CUDA gave it, which no other memory has while this lives.
    #[cfg(feature = "vulkan")]
    pub(crate) fn number(&self) -> u64 {
        self.handle
    }

    /// A file descriptor of the memory.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let mut prop = property(0);
        // SAFETY: `prop` outlives the call.
        let code = unsafe { self.driver.vmm_properties(&mut prop, self.handle) };
        self.driver.check("pin", "cuMemGetAllocationPropertiesFromHandle", code)?;
        if prop.handle_types & POSIX_FD == 0 {
            return Err(Error::new(
                "pin",
                ErrorKind::UnsupportedMemory(MemoryKind::NotExportable),
                "cuMemCreate memory without a POSIX file descriptor handle type",
            )
            .remedy("ask for CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in cuMemCreate, or use Session::alloc"));
        }
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the call writes one int.
        let code = unsafe { self.driver.vmm_export((&raw mut fd).cast::<c_void>(), self.handle, POSIX_FD_KIND, 0) };
        self.driver.check("pin", "cuMemExportToShareableHandle", code)?;
        // SAFETY: a fresh descriptor that the call made for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        close_on_exec(&fd)?;
        Ok(fd)
    }
}

impl Drop for VmmHandle {
    fn drop(&mut self) {
        // SAFETY: one reference, taken by create or retain.
        let _ = unsafe { self.driver.vmm_release(self.handle) };
    }
}

fn close_on_exec(fd: &OwnedFd) -> Result<()> {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map(drop).map_err(|errno| {
        let errno = crate::sys::num::raw_errno(errno);
        Error::from_errno("export", errno, "the descriptor cannot be kept from programs started later")
    })
}

fn property(ordinal: c_int) -> AllocationProp {
    AllocationProp {
        kind: PINNED,
        handle_types: POSIX_FD,
        location: Location { kind: LOCATION_DEVICE, id: ordinal },
        win32: std::ptr::null_mut(),
        compression: 0,
        rdma_capable: 1,
        usage: 0,
        reserved: [0; 4],
    }
}

/// `cuMemCreate` memory at an address, unmapped and released on drop.
#[derive(Debug)]
pub(crate) struct Vmm {
    driver: &'static Driver,
    addr: u64,
    reserved: usize,
    mapped: bool,
    handle: Option<VmmHandle>,
}

impl Vmm {
    /// At least `bytes`, a whole object of its own. The GPU's primary context is current.
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self> {
        let driver = device.driver;
        let prop = property(device.handle());
        let mut granule = 0;
        // SAFETY: both places outlive the call; option 0 is the minimum granularity.
        let code = unsafe { driver.vmm_granularity(&mut granule, &prop, 0) };
        driver.check("alloc", "cuMemGetAllocationGranularity", code)?;
        let size = bytes.checked_next_multiple_of(granule.max(1)).ok_or_else(|| {
            Error::new("alloc", ErrorKind::OutOfMemory, format!("{bytes} bytes are more than any GPU has"))
        })?;
        let mut vmm = Self { driver, addr: 0, reserved: 0, mapped: false, handle: None };
        let mut handle = 0;
        // SAFETY: both places outlive the call.
        let code = unsafe { driver.vmm_create(&mut handle, size, &prop, 0) };
        driver.check("alloc", "cuMemCreate", code)?;
        vmm.handle = Some(VmmHandle { driver, handle });
        // SAFETY: the place outlives the call.
        let code = unsafe { driver.vmm_reserve(&mut vmm.addr, size, 0, 0, 0) };
        driver.check("alloc", "cuMemAddressReserve", code)?;
        vmm.reserved = size;
        // SAFETY: a fresh reservation and a fresh handle of the same size.
        let code = unsafe { driver.vmm_map(vmm.addr, size, 0, handle, 0) };
        driver.check("alloc", "cuMemMap", code)?;
        vmm.mapped = true;
        let access = AccessDesc { location: prop.location, flags: READ_WRITE };
        // SAFETY: one descriptor, which outlives the call.
        let code = unsafe { driver.vmm_access(vmm.addr, size, &access, 1) };
        driver.check("alloc", "cuMemSetAccess", code)?;
        Ok(vmm)
    }

    pub(crate) fn addr(&self) -> GpuAddr {
        GpuAddr::new(self.addr)
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        match &self.handle {
            Some(handle) => handle.export(),
            None => Err(Error::new("export", ErrorKind::Stale, "the memory was freed")),
        }
    }

    /// Undoes `new`, every step of it, and reports the first failure.
    pub(crate) fn free(&mut self) -> Result<()> {
        let mut result = Ok(());
        if std::mem::take(&mut self.mapped) {
            // SAFETY: mapped by `new`, once.
            let code = unsafe { self.driver.vmm_unmap(self.addr, self.reserved) };
            result = result.and(self.driver.check("free", "cuMemUnmap", code));
        }
        let reserved = std::mem::take(&mut self.reserved);
        if reserved > 0 {
            // SAFETY: reserved by `new`, once.
            let code = unsafe { self.driver.vmm_unreserve(self.addr, reserved) };
            result = result.and(self.driver.check("free", "cuMemAddressFree", code));
        }
        self.handle = None;
        result
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if let Err(error) = self.free() {
            tracing::warn!(%error, "device memory was dropped with an error");
        }
    }
}

/// The two kinds.
#[derive(Debug)]
enum Memory {
    Vmm(Vmm),
    Legacy(u64),
    Freed,
}

/// Device memory behind a [`DeviceBuffer`](crate::DeviceBuffer).
#[derive(Debug)]
pub(crate) struct CudaAllocation {
    memory: Memory,
    addr: GpuAddr,
    bytes: usize,
    /// For upload and download; made when first needed.
    lane: Mutex<Option<Lane>>,
    primary: Primary,
}

impl CudaAllocation {
    pub(crate) fn new(device: Device, bytes: usize, how: Allocator) -> Result<Self> {
        let primary = device.retain_primary()?;
        let _entered = primary.enter()?;
        let (memory, addr) = match how {
            Allocator::Buffer | Allocator::CuMemCreate => {
                let vmm = Vmm::new(&device, bytes)?;
                let addr = vmm.addr();
                (Memory::Vmm(vmm), addr)
            }
            Allocator::CuMemAlloc => {
                let addr = device.driver.allocate(bytes)?;
                (Memory::Legacy(addr.raw()), addr)
            }
        };
        Ok(Self { memory, addr, bytes, lane: Mutex::new(None), primary })
    }

    fn with_lane(&self, run: impl FnMut(&mut Lane) -> Result<()>) -> Result<()> {
        let mut run = run;
        let _entered = self.primary.enter()?;
        let mut lane = self.lane.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if lane.is_none() {
            *lane = Some(Lane::new(self.primary.device.driver)?);
        }
        lane.as_mut().map_or(Ok(()), &mut run)
    }

    fn at(&self, offset: usize) -> u64 {
        // DeviceBuffer checked the offset against the length.
        self.addr.raw() + u64_of(offset)
    }
}

impl Allocation for CudaAllocation {
    fn addr(&self) -> GpuAddr {
        self.addr
    }

    fn ordinal(&self) -> usize {
        self.primary.device.ordinal
    }

    fn owns_object(&self) -> bool {
        match self.memory {
            Memory::Vmm(_) => true,
            _ => self.bytes >= SHARED_BELOW,
        }
    }

    fn upload(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.with_lane(|lane| lane.upload(self.at(offset), from))
    }

    fn download(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.with_lane(|lane| lane.download(to, self.at(offset)))
    }

    fn make_current(&self) -> Result<()> {
        self.primary.make_current()
    }

    fn export(&self) -> Result<OwnedFd> {
        match &self.memory {
            Memory::Vmm(vmm) => vmm.export(),
            _ => Err(Error::new(
                "export",
                ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc),
                "cuMemAlloc memory cannot be exported as a file descriptor",
            )
            .remedy("allocate it with Session::alloc")),
        }
    }

    fn free(&mut self) -> Result<()> {
        let _entered = self.primary.enter()?;
        *self.lane.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        match std::mem::replace(&mut self.memory, Memory::Freed) {
            Memory::Vmm(mut vmm) => vmm.free(),
            Memory::Legacy(addr) => {
                // SAFETY: allocated by `new` and freed once.
                let code = unsafe { self.primary.device.driver.mem_free(addr) };
                self.primary.device.driver.check("free", "cuMemFree", code)
            }
            Memory::Freed => Ok(()),
        }
    }
}

/// Below this size `cuMemAlloc` puts several blocks into one object.
pub(crate) const SHARED_BELOW: usize = 2 << 20;
