//! What kind of memory a device pointer leads to.

use std::ffi::{c_int, c_void};

use super::context::{Device, Entered, Primary};
use super::driver::{Driver, Handle, INVALID_VALUE, SUCCESS};
use super::memory::SHARED_BELOW;
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::range::{GpuAddr, Span};
use crate::sys::num::u64_of;

// CUpointer_attribute.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_POINTER: c_int = 3;
const BUFFER_ID: c_int = 7;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;
const RANGE_START: c_int = 11;
const RANGE_BYTES: c_int = 12;
const MAPPING_BYTES: c_int = 18;
const MAPPING_BASE: c_int = 19;
const MEMPOOL_HANDLE: c_int = 17;

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// What CUDA says of a pointer; all zero for one it does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attributes {
    context: Handle,
    memory_type: u32,
    buffer_id: u64,
    managed: u32,
    ordinal: c_int,
    range: (u64, usize),
    mapping: (u64, usize),
    pool: Handle,
}

fn attributes(driver: &Driver, addr: GpuAddr) -> Result<Attributes> {
    let mut found = Attributes {
        context: std::ptr::null_mut(),
        memory_type: 0,
        buffer_id: 0,
        managed: 0,
        ordinal: -1,
        range: (0, 0),
        mapping: (0, 0),
        pool: std::ptr::null_mut(),
    };
    let mut which = [
        CONTEXT,
        MEMORY_TYPE,
        BUFFER_ID,
        IS_MANAGED,
        DEVICE_ORDINAL,
        MEMPOOL_HANDLE,
        RANGE_START,
        RANGE_BYTES,
        MAPPING_BASE,
        MAPPING_BYTES,
    ];
    let mut into: [*mut c_void; 10] = [
        (&raw mut found.context).cast(),
        (&raw mut found.memory_type).cast(),
        (&raw mut found.buffer_id).cast(),
        (&raw mut found.managed).cast(),
        (&raw mut found.ordinal).cast(),
        (&raw mut found.pool).cast(),
        (&raw mut found.range.0).cast(),
        (&raw mut found.range.1).cast(),
        (&raw mut found.mapping.0).cast(),
        (&raw mut found.mapping.1).cast(),
    ];
    // SAFETY: as many attributes as places, each place of the size its attribute has; all outlive the call.
    let code = unsafe { driver.pointer_attributes(10, which.as_mut_ptr(), into.as_mut_ptr(), addr.raw()) };
    driver.check("pin", "cuPointerGetAttributes", code)?;
    Ok(found)
}

/// What CUDA says of host memory; all zero where it does not know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HostAttributes {
    memory_type: u32,
    device_pointer: u64,
    buffer_id: u64,
    managed: u32,
}

fn host_attributes(driver: &Driver, at: *const u8) -> Result<HostAttributes> {
    let mut found = HostAttributes::default();
    let mut which = [MEMORY_TYPE, DEVICE_POINTER, BUFFER_ID, IS_MANAGED];
    let mut into: [*mut c_void; 4] = [
        (&raw mut found.memory_type).cast(),
        (&raw mut found.device_pointer).cast(),
        (&raw mut found.buffer_id).cast(),
        (&raw mut found.managed).cast(),
    ];
    // SAFETY: as many attributes as places, each place of the size its attribute has; all outlive the call.
    let code = unsafe { driver.pointer_attributes(4, which.as_mut_ptr(), into.as_mut_ptr(), u64_of(at.addr())) };
    driver.check("agent", "cuPointerGetAttributes", code)?;
    Ok(found)
}

/// Where kernels in the GPU's primary context find page-locked host memory. Both ends are asked for, which have to be of one
/// allocation.
pub(crate) fn of_page_locked(ordinal: usize, memory: *const u8, bytes: usize) -> Result<GpuAddr> {
    let refuse = |cause: String| {
        Err(Error::new("agent", ErrorKind::InvalidArgument, cause).remedy(
            "page-lock all of it with cuMemHostRegister (cudaHostRegister), or allocate with cuMemHostAlloc (cudaHostAlloc)",
        ))
    };
    let driver = Driver::get()?;
    let primary = Device::new(driver, ordinal)?.retain_primary()?;
    let _entered = primary.enter()?;
    let at = |offset: usize| host_attributes(driver, memory.wrapping_add(offset));
    let (first, last) = (at(0)?, at(bytes.saturating_sub(1))?);
    let is_locked =
        |found: &HostAttributes| found.memory_type == HOST && found.managed == 0 && found.device_pointer != 0;
    match (is_locked(&first), is_locked(&last)) {
        (false, _) => refuse(format!("{bytes} bytes of host memory at {memory:p} are not page-locked by CUDA")),
        (true, false) => {
            refuse(format!("only the first part of {bytes} bytes of host memory at {memory:p} is page-locked"))
        }
        _ if first.buffer_id != last.buffer_id
            || last.device_pointer.wrapping_sub(first.device_pointer) != u64_of(bytes) - 1 =>
        {
            refuse(format!("{bytes} bytes of host memory at {memory:p} are of several page-locked allocations"))
        }
        _ => Ok(GpuAddr::new(first.device_pointer)),
    }
}

/// A span of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) base: GpuAddr,
    pub(crate) bytes: usize,
}

/// The allocation, or the mapping of one, around a device pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) base: GpuAddr,
    pub(crate) bytes: usize,
    /// What is mapped at one go around it: the memory object, to a page of the GPU's.
    pub(crate) mapping: Extent,
    /// Unique over the life of the process; another after free and allocation at the same address.
    pub(crate) id: u64,
    pub(crate) ordinal: usize,
    context: ContextHandle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ContextHandle(Handle);

// SAFETY: a value to compare and to hand to CUDA, which allows any thread.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}

fn refuse(addr: GpuAddr, kind: MemoryKind, what: &'static str, remedy: &'static str) -> Error {
    Error::new("pin", ErrorKind::UnsupportedMemory(kind), format!("{addr} is {what}")).remedy(remedy)
}

/// Whether memory of stream-ordered pools will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pools {
    Fine,
    Refused,
}

impl Block {
    /// Looks a pointer up, refusing by name what can never be mapped.
    pub(crate) fn of(driver: &Driver, addr: GpuAddr, pools: Pools) -> Result<Self> {
        let attributes = attributes(driver, addr)?;
        match attributes.memory_type {
            _ if attributes.managed != 0 => {
                return Err(refuse(
                    addr,
                    MemoryKind::Managed,
                    "managed memory, which migrates between host and GPU",
                    "allocate with Session::alloc or cudaMalloc",
                ));
            }
            DEVICE => {}
            HOST => {
                return Err(refuse(
                    addr,
                    MemoryKind::Host,
                    "host memory",
                    "read and write it directly; pin device memory only",
                ));
            }
            _ => {
                return Err(refuse(
                    addr,
                    MemoryKind::Unallocated,
                    "not in any live CUDA allocation of this process",
                    "pass a device pointer that was allocated here and not freed",
                ));
            }
        }
        if !attributes.pool.is_null() && pools == Pools::Refused {
            return Err(refuse(
                addr,
                MemoryKind::Pool,
                "memory of a stream-ordered pool (cudaMallocAsync; every cudarc slice)",
                "allocate with Session::alloc and lend it to kernels, or use cudaMalloc",
            ));
        }
        let block = Self {
            base: GpuAddr::new(attributes.range.0),
            bytes: attributes.range.1,
            mapping: Extent { base: GpuAddr::new(attributes.mapping.0), bytes: attributes.mapping.1 },
            id: attributes.buffer_id,
            ordinal: usize::try_from(attributes.ordinal).unwrap_or(0),
            context: ContextHandle(attributes.context),
        };
        if addr < block.base || addr.raw() >= block.end() {
            return Err(Error::new("pin", ErrorKind::Stale, format!("CUDA states no range around {addr}"))
                .remedy("keep the allocation alive while it is pinned"));
        }
        Ok(block)
    }

    /// The `cuMemCreate` mapping around the pointer, where that is what it leads to.
    pub(crate) fn vmm(mut self) -> Self {
        // The range of such memory may be a whole reservation; what one handle backs is the mapping.
        (self.base, self.bytes) = (self.mapping.base, self.mapping.bytes);
        self
    }

    /// The allocation, or for `cuMemCreate` memory its mapping.
    pub(crate) fn around(self, driver: &'static Driver, addr: GpuAddr) -> Self {
        if super::memory::VmmHandle::behind(driver, addr).is_some() { self.vmm() } else { self }
    }

    /// Whether other allocations can be in the same memory object, which then outlives this one. `cuMemCreate` memory is
    /// never so small.
    pub(crate) fn shares_object(&self) -> bool {
        self.bytes < SHARED_BELOW
    }

    pub(crate) fn end(&self) -> u64 {
        self.base.raw().saturating_add(u64_of(self.bytes))
    }

    /// Whether kernels of this context can reach it: memory without a context is everybody's on its GPU.
    pub(crate) fn is_in(&self, primary: &Primary) -> bool {
        self.context.0.is_null() || self.context.0 == primary.handle()
    }

    /// Checks that `span`, which starts in this block, also ends in it.
    pub(crate) fn contains(&self, span: Span) -> Result<()> {
        if span.end() <= self.end() {
            return Ok(());
        }
        let cause = format!(
            "{} bytes from {} reach past the end of an allocation of {} bytes at {}",
            span.len, span.addr, self.bytes, self.base
        );
        Err(Error::new("pin", ErrorKind::OutOfBounds, cause).remedy("pin only what was allocated"))
    }

    /// Makes the block's own context current, or its GPU's primary one where it has none.
    pub(crate) fn enter(&self, device: &Device) -> Result<BlockContext> {
        let driver = device.driver;
        if self.context.0.is_null() {
            let primary = device.retain_primary()?;
            Ok(BlockContext { _entered: primary.enter()?, _primary: Some(primary) })
        } else {
            Ok(BlockContext { _entered: Entered::new(driver, self.context.0)?, _primary: None })
        }
    }

    /// `cuIpcGetMemHandle` of the block.
    pub(crate) fn ipc_words(&self, driver: &Driver) -> Result<[u32; 16]> {
        let mut words = [0; 16];
        // SAFETY: CUipcMemHandle is 64 bytes; the pointer was a live allocation's, a dead one is an error code.
        let code = unsafe { driver.ipc_handle(&mut words, self.base.raw()) };
        match code {
            SUCCESS => Ok(words),
            // Managed and pool memory were refused before, so what CUDA will not share is not ours to share.
            INVALID_VALUE => Err(refuse(
                self.base,
                MemoryKind::Foreign,
                "memory that another process allocated (cudaIpcOpenMemHandle), or that CUDA does not share",
                "pin it in the process that allocated it, or allocate with Session::alloc",
            )
            .cuda(code)),
            _ => Err(driver.error("pin", "cuIpcGetMemHandle", code).remedy("allocate with Session::alloc instead")),
        }
    }
}

/// A block's context, current on this thread until dropped.
#[derive(Debug)]
pub(crate) struct BlockContext {
    // Popped before it is released.
    _entered: Entered,
    _primary: Option<Primary>,
}
