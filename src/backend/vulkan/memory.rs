//! Memory objects imported into Vulkan, and their appearance in this process.

use std::fmt;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;
use nix::fcntl::{FcntlArg, fcntl};

use super::gpu::Gpu;
use super::instance::failed;
use crate::error::{Error, ErrorKind, Feature, MemoryKind, Result};
use crate::sys::num::{u64_of, usize_of};
use crate::sys::window::{HUGE, Window};

/// One memory object, freed on drop.
#[derive(Debug)]
struct Piece {
    gpu: Arc<Gpu>,
    memory: vk::DeviceMemory,
    bytes: usize,
}

impl Piece {
    fn import(gpu: &Arc<Gpu>, fd: OwnedFd, bytes: usize) -> Result<Self> {
        let mut import = vk::ImportMemoryFdInfoKHR::default()
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD)
            .fd(fd.as_raw_fd());
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(u64_of(bytes))
            .memory_type_index(gpu.visible.index)
            .push_next(&mut import);
        // SAFETY: the device lives, and `info` with its chain outlives the call.
        let made = unsafe { gpu.device.allocate_memory(&info, None) };
        // Vulkan's on success, and ours to close if the import failed. Some drivers (Mesa's lavapipe 22.3) close it then
        // too, against the specification, and what is closed must not be closed again.
        if made.is_ok() || fcntl(&fd, FcntlArg::F_GETFD).is_err() {
            let _ = fd.into_raw_fd();
        }
        let memory = made.map_err(|result| not_imported(result, bytes))?;
        Ok(Self { gpu: Arc::clone(gpu), memory, bytes })
    }

    /// Where the driver likes it.
    fn map(&self) -> Result<NonNull<u8>> {
        let flags = vk::MemoryMapFlags::empty();
        // SAFETY: host-visible memory that is not mapped, as `Objects` sees to under its lock.
        let at = unsafe { self.gpu.device.map_memory(self.memory, 0, vk::WHOLE_SIZE, flags) }
            .map_err(|result| not_mapped(result, self.bytes))?;
        NonNull::new(at.cast()).ok_or_else(|| Error::new("map", ErrorKind::Io(libc::EIO), "vkMapMemory returned null"))
    }

    fn unmap(&self) {
        // SAFETY: mapped by `map`, once.
        unsafe { self.gpu.device.unmap_memory(self.memory) };
    }

    /// At an address inside a reservation of ours.
    fn place(&self, calls: &ash::khr::map_memory2::DeviceFn, at: NonNull<u8>) -> Result<(), vk::Result> {
        let mut place = vk::MemoryMapPlacedInfoEXT::default().placed_address(at.as_ptr().cast());
        let info = vk::MemoryMapInfoKHR::default()
            .flags(vk::MemoryMapFlags::PLACED_EXT)
            .memory(self.memory)
            .size(vk::WHOLE_SIZE)
            .push_next(&mut place);
        let mut found = std::ptr::null_mut();
        // SAFETY: as in `map`; the pages at `at` are reserved by a window that nobody else refers to, and aligned.
        unsafe { (calls.map_memory2_khr)(self.gpu.device.handle(), &info, &mut found) }.result()?;
        if found == at.as_ptr().cast() {
            return Ok(());
        }
        // Against the specification, but then it can at least be taken back.
        self.unmap();
        Err(vk::Result::ERROR_MEMORY_MAP_FAILED)
    }

    /// Leaves the pages reserved.
    fn displace(&self, calls: &ash::khr::map_memory2::DeviceFn) -> Result<()> {
        let info = vk::MemoryUnmapInfoKHR::default().flags(vk::MemoryUnmapFlagsKHR::RESERVE_EXT).memory(self.memory);
        // SAFETY: mapped by `place`, once.
        let result = unsafe { (calls.unmap_memory2_khr)(self.gpu.device.handle(), &info) };
        result.result().map_err(|result| failed("unmap", "vkUnmapMemory2KHR", result))
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: freed once; `Objects` unmaps before.
        unsafe { self.gpu.device.free_memory(self.memory, None) };
    }
}

fn not_imported(result: vk::Result, bytes: usize) -> Error {
    let error = |kind, cause: String| Error::new("pin", kind, cause);
    match result {
        vk::Result::ERROR_INVALID_EXTERNAL_HANDLE => error(
            ErrorKind::UnsupportedMemory(MemoryKind::Foreign),
            format!("the Vulkan driver does not take {bytes} bytes of CUDA memory by their descriptor"),
        )
        .remedy("allocate with Session::alloc"),
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => {
            error(ErrorKind::Bar1Exhausted, format!("no room in BAR1 for {bytes} bytes ({result:?})"))
                .remedy("unpin other memory, or pin a smaller allocation")
        }
        vk::Result::ERROR_TOO_MANY_OBJECTS => {
            error(ErrorKind::OutOfMemory, "Vulkan holds as many memory objects as it can".to_owned())
                .remedy("unpin other memory, or put what you pin into fewer allocations")
        }
        _ => failed("pin", "vkAllocateMemory", result),
    }
}

fn not_mapped(result: vk::Result, bytes: usize) -> Error {
    match result {
        vk::Result::ERROR_MEMORY_MAP_FAILED => {
            Error::new("map", ErrorKind::Bar1Exhausted, format!("no room to map {bytes} bytes ({result:?})"))
                .remedy("unmap other windows, map a smaller allocation, or raise the address-space limit (ulimit -v)")
        }
        _ => failed("map", "vkMapMemory", result),
    }
}

/// How the objects appear.
#[derive(Debug)]
enum Shown {
    /// Placed in a window of ours.
    In(Window),
    /// Where the driver put the only one.
    At(Place),
}

#[derive(Clone, Copy, Debug)]
struct Place(NonNull<u8>);

// SAFETY: an address of this process; nothing about it is tied to a thread.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Shown {
    fn base(&self) -> NonNull<u8> {
        match self {
            Self::In(window) => window.base(),
            Self::At(place) => place.0,
        }
    }
}

/// Memory objects that lie side by side, held until drop. They appear once, however many views there are.
pub(super) struct Objects {
    shown: Mutex<(usize, Option<Shown>)>,
    pieces: Vec<Piece>,
    gpu: Arc<Gpu>,
}

impl Objects {
    /// Imports what each descriptor stands for, of this many bytes each.
    pub(super) fn import(
        gpu: &Arc<Gpu>,
        from: impl ExactSizeIterator<Item = Result<(OwnedFd, usize)>>,
    ) -> Result<Self> {
        if from.len() > 1 && gpu.placing.is_none() {
            let cause = format!(
                "the range covers {} cuMemCreate handles, which this driver cannot map side by side",
                from.len()
            );
            return Err(Error::new("pin", ErrorKind::UnsupportedFeature(Feature::Operation), cause).remedy(
                "pin each handle's range by itself, update the driver to one with VK_EXT_map_memory_placed, or use \
                 backend 'rm'",
            ));
        }
        let pieces =
            from.map(|part| part.and_then(|(fd, bytes)| Piece::import(gpu, fd, bytes))).collect::<Result<Vec<_>>>()?;
        Ok(Self { shown: Mutex::new((0, None)), pieces, gpu: Arc::clone(gpu) })
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// Takes a share in the mapping, which the first share makes: the address of the first byte.
    pub(super) fn show(&self) -> Result<NonNull<u8>> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let base = match &shown.1 {
            Some(there) => there.base(),
            None => shown.1.insert(self.appear()?).base(),
        };
        shown.0 += 1;
        Ok(base)
    }

    /// Gives a share back. With the last one the mapping goes.
    pub(super) fn hide(&self) -> Result<()> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.0 = shown.0.saturating_sub(1);
        if shown.0 > 0 {
            return Ok(());
        }
        shown.1.take().map_or(Ok(()), |there| self.disappear(there))
    }

    fn appear(&self) -> Result<Shown> {
        if let Some(calls) = &self.gpu.placing {
            match self.appear_in_window(calls) {
                // One object needs no place of its choice.
                Err(error) if self.pieces.len() == 1 => tracing::debug!(%error, "the driver chooses the address"),
                other => return other,
            }
        }
        let [piece] = &*self.pieces else {
            return Err(Error::new(
                "map",
                ErrorKind::UnsupportedFeature(Feature::Operation),
                "nothing to map by itself",
            ));
        };
        let at = piece.map()?;
        if let Err(error) = Window::keep_from_children("map", at, piece.bytes) {
            piece.unmap();
            return Err(error);
        }
        Ok(Shown::At(Place(at)))
    }

    fn appear_in_window(&self, calls: &ash::khr::map_memory2::DeviceFn) -> Result<Shown> {
        // Objects are whole 2 MiB pages of the GPU: one entry of the CPU's page tables, too, if they start at one.
        if self.pieces.iter().any(|piece| !piece.bytes.is_multiple_of(HUGE)) {
            let cause = "memory objects that are not whole pages of 2 MiB cannot be mapped side by side";
            return Err(Error::new("map", ErrorKind::UnsupportedFeature(Feature::Operation), cause)
                .remedy("make them multiples of 2 MiB"));
        }
        let window = Window::reserve("map", self.bytes(), 0)?;
        let mut at = window.base();
        for (done, piece) in self.pieces.iter().enumerate() {
            let placed = piece.place(calls, at).map_err(|result| not_mapped(result, piece.bytes));
            let reached = if placed.is_ok() { done + 1 } else { done };
            let placed = placed.and_then(|()| Window::keep_from_children("map", at, piece.bytes));
            if let Err(error) = placed {
                let back = self.pieces.iter().take(reached).try_for_each(|piece| piece.displace(calls));
                // Pages that may still show memory are nobody else's to reuse.
                if back.is_err() {
                    std::mem::forget(window);
                }
                return Err(error);
            }
            at = at.map_addr(|addr| addr.saturating_add(piece.bytes));
        }
        Ok(Shown::In(window))
    }

    fn disappear(&self, there: Shown) -> Result<()> {
        match (there, &self.gpu.placing) {
            (Shown::In(window), Some(calls)) => {
                let mut result = Ok(());
                for piece in &self.pieces {
                    result = result.and(piece.displace(calls));
                }
                match result {
                    Ok(()) => window.unmap(),
                    // As in `appear_in_window`.
                    Err(error) => {
                        std::mem::forget(window);
                        Err(error)
                    }
                }
            }
            _ => {
                self.pieces.iter().for_each(Piece::unmap);
                Ok(())
            }
        }
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        let shown = self.shown.get_mut().unwrap_or_else(PoisonError::into_inner).1.take();
        if let Some(Err(error)) = shown.map(|there| self.disappear(there)) {
            tracing::warn!(%error, "memory objects were dropped with an error");
        }
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects")
            .field("pieces", &self.pieces.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// A share in the mapping of objects, given back on drop.
#[derive(Debug)]
pub(super) struct Share {
    objects: Option<Arc<Objects>>,
    base: Place,
}

impl Share {
    pub(super) fn of(objects: &Arc<Objects>) -> Result<Self> {
        let base = Place(objects.show()?);
        Ok(Self { objects: Some(Arc::clone(objects)), base })
    }

    /// The address of byte `offset`, which is inside.
    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        self.base.0.map_addr(|addr| addr.saturating_add(usize_of(offset)))
    }

    pub(super) fn bytes(&self) -> usize {
        self.objects.as_ref().map_or(0, |objects| objects.bytes())
    }

    pub(super) fn release(&mut self) -> Result<()> {
        self.objects.take().map_or(Ok(()), |objects| objects.hide())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "a window was dropped with an error");
        }
    }
}
