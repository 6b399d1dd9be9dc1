//! One GPU as the resource manager has it, and the memory objects held on it.

use std::collections::HashMap;
use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::view::RmView;
use crate::error::{Error, ErrorKind, MemoryKind, Result};
use crate::gpu::PciAddress;
use crate::range::page_cover;
use crate::sys::num::{u64_of, usize_of};
use crate::sys::rm::{
    Client, DeviceFile, Imported, RmFailure, RmHandle, STATUS_INVALID_PARAMETER, STATUS_NO_PERMISSION,
    STATUS_OUT_OF_RANGE,
};
use crate::sys::window::PAGE;

/// Names for imported objects start here, away from those that RM chooses by itself.
const FIRST_NAME: u32 = 0x7d00_0000;

/// Our client of the resource manager, and the GPUs opened through it.
#[derive(Debug)]
pub(super) struct Manager {
    pub(super) client: Client,
    nodes: Mutex<HashMap<PciAddress, Arc<Node>>>,
    names: AtomicU32,
}

/// An opened GPU.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) pci: PciAddress,
    pub(super) device: RmHandle,
    pub(super) path: String,
    /// Keeps the GPU awake while the node lives.
    _file: DeviceFile,
}

/// `/dev/nvidiaN` of the GPU at a PCI address. N is the driver's minor number, which no CUDA ordinal tells.
fn device_path(pci: PciAddress) -> Result<String> {
    let info = format!("/proc/driver/nvidia/gpus/{pci}/information");
    let text = fs::read_to_string(&info).map_err(|error| {
        Error::new("open GPU", ErrorKind::NoDevice, format!("{info} cannot be read: {error}"))
            .remedy("let the container see /proc/driver/nvidia, or check the PCI address")
    })?;
    let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse::<u32>().ok());
    minor
        .map(|minor| format!("/dev/nvidia{minor}"))
        .ok_or_else(|| Error::new("open GPU", ErrorKind::NoDevice, format!("{info} does not state the device minor")))
}

impl Manager {
    pub(super) fn open() -> Result<Self> {
        Ok(Self { client: Client::open()?, nodes: Mutex::default(), names: AtomicU32::new(FIRST_NAME) })
    }

    pub(super) fn node(&self, pci: PciAddress) -> Result<Arc<Node>> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = nodes.get(&pci) {
            return Ok(Arc::clone(node));
        }
        let path = device_path(pci)?;
        let file = DeviceFile::open(&path)?;
        let failed = |what: &'static str| move |failure: RmFailure| failure.error("open GPU", what);
        file.register(self.client.control_file()).map_err(failed("register the device file"))?;
        let instance = self.client.device_instance(pci).map_err(failed("look the GPU up"))?.ok_or_else(|| {
            Error::new("open GPU", ErrorKind::NoDevice, format!("the driver does not list a GPU at {pci}"))
                .remedy("check nvidia-smi")
        })?;
        let device = self.client.open_device(instance).map_err(failed("open the GPU"))?;
        let node = Arc::new(Node { pci, device, path, _file: file });
        nodes.insert(pci, Arc::clone(&node));
        Ok(node)
    }
}

/// A memory object held by our client.
#[derive(Clone, Copy, Debug)]
struct Piece {
    object: RmHandle,
    bytes: u64,
}

/// Memory objects that lie behind one device range, in order, released on drop.
#[derive(Debug)]
pub(super) struct Held {
    manager: Arc<Manager>,
    node: Arc<Node>,
    pieces: Vec<Piece>,
}

impl Held {
    pub(super) fn none(manager: &Arc<Manager>, node: &Arc<Node>) -> Self {
        Self { manager: Arc::clone(manager), node: Arc::clone(node), pieces: Vec::new() }
    }

    fn push(&mut self, object: RmHandle) -> std::result::Result<u64, RmFailure> {
        // Held from here on, so that it is released whatever comes next.
        self.pieces.push(Piece { object, bytes: 0 });
        // Asked of RM itself: what anybody else says of the size is checked against it.
        let bytes = u64::from(self.manager.client.pages(object)?) * u64_of(PAGE);
        if let Some(piece) = self.pieces.last_mut() {
            piece.bytes = bytes;
        }
        Ok(bytes)
    }

    /// Duplicates an object of CUDA's own client.
    pub(super) fn duplicate(
        manager: &Arc<Manager>,
        node: &Arc<Node>,
        client: u32,
        object: u32,
    ) -> std::result::Result<Self, RmFailure> {
        let mut held = Self::none(manager, node);
        let object = manager.client.duplicate(node.device, client, object)?;
        held.push(object)?;
        Ok(held)
    }

    /// Adds everything that CUDA exported through `fd`, behind what is already held; large memory arrives as several
    /// objects. Returns the bytes added.
    pub(super) fn import(&mut self, fd: BorrowedFd<'_>) -> Result<u64> {
        let mut added = 0;
        for index in 0..u16::MAX {
            let name = RmHandle(self.manager.names.fetch_add(1, Ordering::Relaxed));
            match self.manager.client.import(self.node.device, fd, index, name) {
                Ok(Imported::VideoMemory(object)) => {
                    added += self.push(object).map_err(|failure| failure.error("pin", "state an object's size"))?;
                }
                Ok(Imported::Nothing) => break,
                Err(RmFailure::Status(STATUS_INVALID_PARAMETER | STATUS_OUT_OF_RANGE)) => break,
                Ok(Imported::Other) => {
                    return Err(Error::new(
                        "pin",
                        ErrorKind::UnsupportedMemory(MemoryKind::Foreign),
                        "the exported memory is not video memory of this GPU",
                    )
                    .remedy("pin memory that cuMemCreate placed on the GPU"));
                }
                Err(failure) => return Err(explain(failure, "import exported memory")),
            }
        }
        if added == 0 {
            return Err(Error::new(
                "pin",
                ErrorKind::UnsupportedMemory(MemoryKind::Foreign),
                "the descriptor holds no GPU memory",
            )
            .remedy("pass a descriptor from cuMemExportToShareableHandle or DeviceBuffer::export"));
        }
        Ok(added)
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// Makes `len` bytes appear, `offset` bytes into the concatenation of the pieces.
    pub(super) fn map(&self, offset: u64, len: usize) -> Result<RmView> {
        let covered = page_cover(offset, len, PAGE).filter(|&(head, total)| {
            (offset - u64_of(head)).checked_add(u64_of(total)).is_some_and(|end| end <= self.bytes())
        });
        let Some((head, total)) = covered else {
            let cause = format!("{len} bytes at offset {offset} are not inside {} bytes of memory", self.bytes());
            return Err(Error::new("map", ErrorKind::OutOfBounds, cause));
        };
        let from = offset - u64_of(head);
        let mut view = RmView::reserve(&self.manager, &self.node, total, usize_of(from), head)?;
        let (mut start, mut at) = (0, 0);
        for piece in &self.pieces {
            let end = start + piece.bytes;
            if end > from && at < total {
                let inside = from.max(start) - start;
                let size = usize_of(piece.bytes - inside).min(total - at);
                view.add(piece.object, inside, at, size)?;
                at += size;
            }
            start = end;
        }
        Ok(view)
    }

    pub(super) fn release(&mut self) -> Result<()> {
        let mut result = Ok(());
        for piece in self.pieces.drain(..) {
            let freed = self.manager.client.free(self.node.device, piece.object);
            result = result.and(freed.map_err(|failure| failure.error("unpin", "release memory")));
        }
        result
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "memory objects were dropped with an error");
        }
    }
}

/// Names the usual reasons for which RM refuses an object.
pub(super) fn explain(failure: RmFailure, what: &'static str) -> Error {
    let error = failure.error("pin", what);
    match failure {
        RmFailure::Status(STATUS_NO_PERMISSION) => error.remedy(
            "memory can be reached by the user who started CUDA: do not change uid after CUDA has started, nor pin under \
             an MPS server of another user",
        ),
        RmFailure::Errno(libc::EINVAL | libc::ENOTTY | libc::ENOSYS) => {
            error.remedy("a sandbox may filter the driver's calls (gVisor does): run outside it, or use another backend")
        }
        _ => error,
    }
}
