//! Backend `vulkan`: CUDA memory imported into Vulkan and mapped there. Public calls alone, and no kernel module.
//!
//! Exportable `cuMemCreate` memory goes from CUDA to Vulkan as a file descriptor (`cuMemExportToShareableHandle`,
//! `VK_KHR_external_memory_fd`), into a memory type that is device-local and host-visible, and `vkMapMemory` makes it
//! appear. Pins of one object share its import and its mapping.

#![allow(unsafe_code, reason = "calls into the Vulkan loader and driver")]

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::backend::{
    AfterFree, Allocation, Allocator, Backend, BackendKind, MappingType, P2pTokens, Pin, PinFacts, Semantics, View,
    only,
};
use crate::cuda::context::Device;
use crate::cuda::driver::Driver;
use crate::cuda::memory::VmmHandle;
use crate::cuda::pointer::{Block, Pools};
use crate::error::{Error, ErrorKind, Feature, MemoryKind, Result};
use crate::gpu::{GpuInfo, PciAddress};
use crate::range::{GpuAddr, Span};
use crate::sys::num::u64_of;

mod choose;
mod gpu;
mod instance;
mod memory;
mod slab;
#[cfg(test)]
mod tests;

use choose::Uuid;
use gpu::Gpu;
use instance::{Instance, Loader};
use memory::{Objects, Share};
use slab::{Reach, SMALL_BELOW, Slabs};

/// What takes half a second to make, and is made by the first pin.
#[derive(Debug, Default)]
struct Opened {
    instance: Option<Arc<Instance>>,
    gpus: HashMap<Uuid, Arc<Gpu>>,
}

/// The backend.
#[derive(Debug)]
pub(crate) struct Vulkan {
    // Declared in the order in which they go.
    held: Mutex<HashMap<Vec<u64>, Weak<Held>>>,
    opened: Mutex<Opened>,
    slabs: Arc<Slabs>,
    loader: Loader,
}

impl Vulkan {
    /// Opens the loader and has it look for a driver. Makes no instance and no CUDA context.
    pub(crate) fn open() -> Result<Self> {
        let loader = Loader::open()?;
        Driver::loaded()?;
        Ok(Self { held: Mutex::default(), opened: Mutex::default(), slabs: Arc::default(), loader })
    }

    fn gpu(&self, uuid: Uuid) -> Result<Arc<Gpu>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = opened.gpus.get(&uuid) {
            return Ok(Arc::clone(gpu));
        }
        let instance = match &opened.instance {
            Some(instance) => Arc::clone(instance),
            None => Arc::clone(opened.instance.insert(Instance::shared(&self.loader)?)),
        };
        let (physical, name) = instance.device(uuid)?;
        let gpu = Gpu::open(&instance, physical, &name)?;
        opened.gpus.insert(uuid, Arc::clone(&gpu));
        Ok(gpu)
    }

    fn hold(&self, span: Span, reach: Reach) -> Result<Box<dyn Pin>> {
        let driver = Driver::get()?;
        let small = self.slabs.find(span, reach)?;
        let first = Block::of(driver, span.addr, Pools::Refused)?;
        let device = Device::new(driver, first.ordinal)?;
        device.refuse_partitions(BackendKind::Vulkan)?;
        let parts = parts_of(driver, span, first)?;
        let bases: Vec<GpuAddr> = parts.iter().map(|part| part.base).collect();
        let offset = bases.first().and_then(|&base| span.addr.offset_from(base)).map_or(0, u64_of);
        let held = self.import(&device, parts)?;
        let facts = PinFacts {
            after_free: if small.is_some() { AfterFree::Aliased } else { AfterFree::Persistent },
            pci: device.pci().ok(),
            ordered_writes: device.orders_writes(),
        };
        let small = small.map(|block| (Arc::clone(&self.slabs), block));
        Ok(Box::new(VulkanPin { held: Some(held), offset, span, device, small, bases, facts }))
    }

    /// The import of these parts, made now if no pin has it.
    fn import(&self, device: &Device, parts: Vec<Part>) -> Result<Arc<Held>> {
        let gpu = self.gpu(device.uuid()?)?;
        // While an import lives it keeps its handles, and so no other memory has their numbers.
        let key: Vec<u64> = parts.iter().map(|part| part.handle.number()).collect();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = held.get(&key).and_then(Weak::upgrade)
            && there.parts.iter().map(|part| part.bytes).eq(parts.iter().map(|part| part.bytes))
        {
            return Ok(there);
        }
        let exported = parts.iter().map(|part| Ok((part.handle.export()?, part.bytes)));
        let objects = Arc::new(Objects::import(&gpu, exported)?);
        let made = Arc::new(Held { objects, parts });
        if held.len() == held.capacity() {
            held.retain(|_, there| there.strong_count() > 0);
        }
        held.insert(key, Arc::downgrade(&made));
        Ok(made)
    }
}

/// A mapped `cuMemCreate` handle.
#[derive(Debug)]
struct Part {
    base: GpuAddr,
    bytes: usize,
    handle: VmmHandle,
}

/// The handles behind every mapping that `span` covers, in order.
fn parts_of(driver: &'static Driver, span: Span, first: Block) -> Result<Vec<Part>> {
    let handle = VmmHandle::behind(driver, span.addr).ok_or_else(|| refuse_legacy(span.addr))?;
    let (mut block, mut handle, mut parts) = (first.vmm(), handle, Vec::with_capacity(1));
    loop {
        parts.push(Part { base: block.base, bytes: block.bytes, handle });
        if span.end() <= block.end() {
            return Ok(parts);
        }
        let next = GpuAddr::new(block.end());
        let following = Block::of(driver, next, Pools::Refused).ok().map(Block::vmm);
        let following = following.filter(|following| following.base == next && following.ordinal == block.ordinal);
        match following.and_then(|following| Some((following, VmmHandle::behind(driver, next)?))) {
            Some(found) => (block, handle) = found,
            None => return block.contains(span).map(|()| parts),
        }
    }
}

fn refuse_legacy(addr: GpuAddr) -> Error {
    let cause = format!("{addr} is cudaMalloc memory, which CUDA exports to no other programming interface");
    Error::new("pin", ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc), cause).remedy(
        "allocate with Session::alloc or exportable cuMemCreate, or use backend 'gdrdrv', or 'rm' with GDRCOPY_RM=ipc",
    )
}

/// An import states the size of the whole memory object (Vulkan specification, VkMemoryAllocateInfo), and no public call
/// tells it: not from the descriptor, not through CUDA, where a handle has properties but no length. One of the caller's
/// guesses would be taken or refused as the driver likes.
fn refuse_export() -> Error {
    let cause = "backend 'vulkan' cannot import exported memory: Vulkan asks for the size of the whole memory object, \
                 which a descriptor does not tell";
    Error::new("pin", ErrorKind::UnsupportedFeature(Feature::Operation), cause)
        .remedy("use backend 'rm' here; or have this process map the memory through CUDA and pin its device pointer")
}

impl Backend for Vulkan {
    fn kind(&self) -> BackendKind {
        BackendKind::Vulkan
    }

    fn semantics(&self) -> Semantics {
        Semantics { whole_object: AfterFree::Persistent, shared_object: AfterFree::Aliased }
    }

    fn gpus(&self) -> Result<Vec<GpuInfo>> {
        crate::cuda::gpus()
    }

    fn alloc(&self, ordinal: Option<usize>, bytes: usize, how: Allocator) -> Result<Box<dyn Allocation>> {
        if how == Allocator::Buffer && bytes < SMALL_BELOW {
            return self.slabs.alloc(crate::cuda::device(ordinal)?, bytes);
        }
        crate::cuda::allocate(ordinal, bytes, how)
    }

    fn pin(&self, span: Span) -> Result<Box<dyn Pin>> {
        self.hold(span, Reach::Block)
    }

    /// Memory objects are whole pages, so the pages around a range are in the same ones.
    fn pin_pages(&self, asked: Span, _tokens: P2pTokens) -> Result<Box<dyn Pin>> {
        self.hold(asked.gpu_pages("pin")?, Reach::Object)
    }

    fn pin_export(&self, _fd: BorrowedFd<'_>, _gpu: PciAddress, _bytes: usize) -> Result<Box<dyn Pin>> {
        Err(refuse_export())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Imported memory, let go in the order in which the fields are.
#[derive(Debug)]
struct Held {
    objects: Arc<Objects>,
    parts: Vec<Part>,
}

impl Held {
    /// Whether these addresses, one for each part, still lead to the memory that was imported.
    fn is_at(&self, bases: &[GpuAddr], driver: &'static Driver) -> bool {
        self.parts.iter().zip(bases).all(|(part, &base)| {
            VmmHandle::behind(driver, base).is_some_and(|now| now.number() == part.handle.number())
        })
    }
}

#[derive(Debug)]
struct VulkanPin {
    /// Present until released.
    held: Option<Arc<Held>>,
    /// Of the range, in the held memory.
    offset: u64,
    span: Span,
    device: Device,
    /// The small buffer that the range is in.
    small: Option<(Arc<Slabs>, slab::Block)>,
    /// Of each part of the held memory. Another pin of it may have it elsewhere.
    bases: Vec<GpuAddr>,
    facts: PinFacts,
}

impl VulkanPin {
    fn stale(&self) -> Error {
        let cause = format!("the memory at {} was freed or replaced since it was pinned", self.span.addr);
        Error::new("map", ErrorKind::Stale, cause)
            .remedy("keep the allocation alive while it is pinned, and pin the new one")
    }
}

impl Pin for VulkanPin {
    fn facts(&self) -> PinFacts {
        self.facts
    }

    fn cuda_flush(&self) -> Result<()> {
        self.device.flush_writes()
    }

    fn map(&self, want: Option<MappingType>) -> Result<Box<dyn View>> {
        let held = self.held.as_ref().ok_or_else(|| self.stale())?;
        let mapping_type = held.objects.gpu().visible.mapping_type;
        only(BackendKind::Vulkan, mapping_type, want)?;
        let share = Share::of(&held.objects)?;
        // Asked once the window exists: what it shows is what the address leads to at this moment.
        let small_still = self.small.as_ref().is_none_or(|(slabs, block)| slabs.still(*block));
        if !small_still || !held.is_at(&self.bases, self.device.driver) {
            return Err(self.stale());
        }
        Ok(Box::new(VulkanView { share, offset: self.offset, mapping_type, _held: Arc::clone(held) }))
    }

    fn release(&mut self) -> Result<()> {
        self.held = None;
        Ok(())
    }
}

#[derive(Debug)]
struct VulkanView {
    share: Share,
    offset: u64,
    mapping_type: MappingType,
    /// Keeps the handles until the mapping is gone.
    _held: Arc<Held>,
}

impl View for VulkanView {
    fn ptr(&self) -> NonNull<u8> {
        self.share.at(self.offset)
    }

    fn mapping_type(&self) -> MappingType {
        self.mapping_type
    }

    fn window_bytes(&self) -> usize {
        self.share.bytes()
    }

    fn release(&mut self) -> Result<()> {
        self.share.release()
    }
}
