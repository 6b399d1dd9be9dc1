//! Windows onto memory objects, and the order in which they go.

use std::ptr::NonNull;
use std::sync::Arc;

use super::node::{Manager, Node};
use crate::backend::{MappingType, View};
use crate::cuda::nvml::Nvml;
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::gpu::PciAddress;
use crate::sys::num::u64_of;
use crate::sys::rm::{DeviceFile, RmFailure, RmHandle, STATUS_NO_MEMORY, STATUS_NO_RESOURCES};
use crate::sys::window::Window;

/// A window onto memory objects.
#[derive(Debug)]
pub(super) struct RmView {
    manager: Arc<Manager>,
    node: Arc<Node>,
    /// Bytes of the window before the first one asked for.
    head: usize,
    /// Object, and the address RM unmaps it by.
    maps: Vec<(RmHandle, u64)>,
    window: Option<Window>,
}

impl RmView {
    /// Reserves the address space. Nothing of the device appears before `add`.
    pub(super) fn reserve(
        manager: &Arc<Manager>,
        node: &Arc<Node>,
        bytes: usize,
        phase: usize,
        head: usize,
    ) -> Result<Self> {
        let window = Window::reserve("map", bytes, phase)?;
        let (manager, node) = (Arc::clone(manager), Arc::clone(node));
        Ok(Self { manager, node, head, maps: Vec::with_capacity(1), window: Some(window) })
    }

    /// Puts `size` bytes of `object`, from its byte `inside`, at `at` in the window.
    pub(super) fn add(&mut self, object: RmHandle, inside: u64, at: usize, size: usize) -> Result<()> {
        // RM ties one mapping to one open file.
        let file = DeviceFile::open(&self.node.path)?;
        let linear = self
            .manager
            .client
            .map(self.node.device, object, inside, u64_of(size), &file)
            .map_err(|failure| refused(failure, self.node.pci, size))?;
        self.maps.push((object, linear));
        match &mut self.window {
            Some(window) => window.place("map", at, size, file.fd(), 0),
            None => Ok(()),
        }
    }
}

fn refused(failure: RmFailure, pci: PciAddress, size: usize) -> Error {
    let nvml = Nvml::get();
    if nvml.is_some_and(Nvml::confidential) {
        return Error::new(
            "map",
            ErrorKind::UnsupportedFeature(Feature::ConfidentialComputing),
            "the GPU runs in confidential-computing mode, in which BAR1 does not show its memory",
        )
        .remedy("use cudaMemcpy on this machine");
    }
    if !matches!(failure, RmFailure::Status(STATUS_NO_MEMORY | STATUS_NO_RESOURCES)) {
        return failure.error("map", "map memory");
    }
    let cause = match nvml.and_then(|nvml| nvml.bar1(pci)) {
        Some(bar1) => {
            let (used, total) = (bar1.used_bytes, bar1.total_bytes);
            format!("no room for {size} bytes in BAR1: {used} of {total} bytes are in use")
        }
        None => format!("no room for {size} bytes in BAR1"),
    };
    Error::new("map", ErrorKind::Bar1Exhausted, cause)
        .remedy("unmap other windows, map a smaller range, or enable Resizable BAR in the firmware")
}

impl View for RmView {
    fn ptr(&self) -> NonNull<u8> {
        let base = self.window.as_ref().map_or(NonNull::dangling(), Window::base);
        base.map_addr(|addr| addr.saturating_add(self.head))
    }

    fn mapping_type(&self) -> MappingType {
        MappingType::WriteCombining
    }

    fn window_bytes(&self) -> usize {
        self.window.as_ref().map_or(0, Window::len)
    }

    /// Address space first, RM's mapping second: never a window onto pages that RM may hand to somebody else.
    fn release(&mut self) -> Result<()> {
        let mut result = self.window.take().map_or(Ok(()), Window::unmap);
        if result.is_err() {
            // The window may still be there: RM's mapping stays until the client goes.
            self.maps.clear();
            return result;
        }
        for (object, linear) in self.maps.drain(..) {
            let unmapped = self.manager.client.unmap(self.node.device, object, linear);
            result = result.and(unmapped.map_err(|failure| failure.error("unmap", "unmap memory")));
        }
        result
    }
}

impl Drop for RmView {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "a window was dropped with an error");
        }
    }
}
