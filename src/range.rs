//! Device addresses and ranges, with checked arithmetic. Nothing here touches a device.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::buffer::DeviceBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::{u64_of, usize_of};

/// An address in a GPU's address space: what CUDA calls a `CUdeviceptr`. The CPU cannot dereference it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuAddr(u64);

impl GpuAddr {
    /// Wraps a raw device pointer.
    #[must_use]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The raw device pointer.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on, or `None` past the end of the address space.
    #[must_use]
    pub fn checked_add(self, bytes: usize) -> Option<Self> {
        self.0.checked_add(u64_of(bytes)).map(Self)
    }

    /// Bytes from `base` up to here, or `None` if `base` is higher.
    #[must_use]
    pub fn offset_from(self, base: Self) -> Option<usize> {
        self.0.checked_sub(base.0).map(usize_of)
    }
}

impl fmt::Debug for GpuAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuAddr({:#x})", self.0)
    }
}

impl fmt::Display for GpuAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl From<u64> for GpuAddr {
    fn from(raw: u64) -> Self {
        Self(raw)
    }
}

/// `addr` and `len` without a lifetime: never empty, never wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) addr: GpuAddr,
    pub(crate) len: usize,
}

impl Span {
    pub(crate) fn new(op: &'static str, addr: GpuAddr, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::new(op, ErrorKind::InvalidArgument, "a device range of 0 bytes cannot be pinned")
                .remedy("ask for at least 1 byte"));
        }
        if addr.raw() == 0 {
            return Err(Error::new(op, ErrorKind::InvalidArgument, "the device pointer is null")
                .remedy("check the result of the allocation call"));
        }
        match addr.checked_add(len) {
            Some(_) if isize::try_from(len).is_ok() => Ok(Self { addr, len }),
            _ => Err(Error::new(
                op,
                ErrorKind::InvalidArgument,
                format!("{len} bytes from {addr} wrap around the address space"),
            )
            .remedy("check that the length is in bytes and not negative")),
        }
    }

    /// The whole GPU pages around it.
    pub(crate) fn gpu_pages(self, op: &'static str) -> Result<Self> {
        let (head, total) = page_cover(self.addr.raw(), self.len, GPU_PAGE)
            .ok_or_else(|| Error::new(op, ErrorKind::InvalidArgument, "the pages around the range wrap"))?;
        Self::new(op, GpuAddr(self.addr.raw() - u64_of(head)), total)
    }

    /// One past the last byte.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "used by backend rm"))]
    pub(crate) const fn end(self) -> u64 {
        // Span::new proved that this does not wrap.
        self.addr.raw() + u64_of(self.len)
    }
}

/// The page in which drivers pin GPU memory for others, and in which the C interface counts.
pub(crate) const GPU_PAGE: usize = 64 << 10;

/// The offset of `addr` in its page and the pages needed to cover `len` bytes from there, in bytes.
///
/// `page` is a power of two. `None` if the rounded end wraps.
pub(crate) fn page_cover(addr: u64, len: usize, page: usize) -> Option<(usize, usize)> {
    let head = usize_of(addr) & (page - 1);
    let total = head.checked_add(len)?.checked_next_multiple_of(page)?;
    Some((head, total))
}

#[derive(Clone)]
enum Keep<'a> {
    Borrowed(PhantomData<&'a ()>),
    Buffer(Arc<DeviceBuffer>),
}

/// Device memory to pin: an address, a length, and a promise that the allocation outlives every mapping of it.
///
/// Make one from a [`DeviceBuffer`] (borrowed, or shared through an [`Arc`], which keeps the buffer alive by itself),
/// from a cudarc slice or view (feature `cuda`), or from a raw pointer with [`DeviceRange::from_raw`].
#[derive(Clone)]
pub struct DeviceRange<'a> {
    span: Span,
    keep: Keep<'a>,
}

impl<'a> DeviceRange<'a> {
    /// A range from a raw device pointer.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if `len` is 0, `addr` is null or the range wraps.
    ///
    /// # Safety
    ///
    /// - **The allocation must outlive every mapping made of this range**, and `'a` must not be longer than the
    ///   allocation lives. CUDA hands the address and the physical memory of a small freed block out again, so a
    ///   mapping that outlives its allocation reads and writes the next owner's data.
    /// - Nothing may rely on the range's bytes being unchanged while a mapping of it is written to: a `&T` view of
    ///   them by other host code, for instance of managed memory.
    #[allow(unsafe_code, reason = "the caller vouches for the allocation; nothing is accessed here")]
    pub unsafe fn from_raw(addr: impl Into<GpuAddr>, len: usize) -> Result<Self> {
        Ok(Self { span: Span::new("range", addr.into(), len)?, keep: Keep::Borrowed(PhantomData) })
    }

    pub(crate) fn borrowed(span: Span) -> Self {
        Self { span, keep: Keep::Borrowed(PhantomData) }
    }

    /// The part of this range between two byte offsets.
    ///
    /// # Errors
    ///
    /// `OutOfBounds` if the part reaches past the end, `InvalidArgument` if it is empty.
    pub fn slice(&self, part: impl RangeBounds<usize>) -> Result<Self> {
        let start = match part.start_bound() {
            Bound::Included(&n) => Some(n),
            Bound::Excluded(&n) => n.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match part.end_bound() {
            Bound::Included(&n) => n.checked_add(1),
            Bound::Excluded(&n) => Some(n),
            Bound::Unbounded => Some(self.span.len),
        };
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Error::new("range", ErrorKind::InvalidArgument, "the part's bounds wrap"));
        };
        let Some(len) = end.checked_sub(start).filter(|_| end <= self.span.len) else {
            return Err(Error::new(
                "range",
                ErrorKind::OutOfBounds,
                format!("bytes {start}..{end} are not inside a range of {} bytes", self.span.len),
            ));
        };
        // In bounds of a span that does not wrap.
        let addr = GpuAddr(self.span.addr.raw() + u64_of(start));
        Ok(Self { span: Span::new("range", addr, len)?, keep: self.keep.clone() })
    }

    /// The first byte's device address.
    #[must_use]
    pub fn addr(&self) -> GpuAddr {
        self.span.addr
    }

    /// The length in bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub fn len(&self) -> usize {
        self.span.len
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }

    pub(crate) fn keeper(&self) -> Option<Arc<DeviceBuffer>> {
        match &self.keep {
            Keep::Borrowed(_) => None,
            Keep::Buffer(buffer) => Some(Arc::clone(buffer)),
        }
    }
}

impl fmt::Debug for DeviceRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRange({}, {} bytes)", self.span.addr, self.span.len)
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceRange<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        Self::borrowed(buffer.span())
    }
}

impl From<Arc<DeviceBuffer>> for DeviceRange<'static> {
    fn from(buffer: Arc<DeviceBuffer>) -> Self {
        Self { span: buffer.span(), keep: Keep::Buffer(buffer) }
    }
}

impl From<&Arc<DeviceBuffer>> for DeviceRange<'static> {
    fn from(buffer: &Arc<DeviceBuffer>) -> Self {
        Self::from(Arc::clone(buffer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn raw(addr: u64, len: usize) -> Result<DeviceRange<'static>> {
        Span::new("range", GpuAddr(addr), len).map(DeviceRange::borrowed)
    }

    #[test]
    fn refuses_empty_null_and_wrapping() {
        for (addr, len) in
            [(0x1000, 0), (0, 64), (u64::MAX - 3, 5), (0x1000, usize::MAX), (1 << 62, usize::MAX / 2 + 1)]
        {
            assert_eq!(raw(addr, len).unwrap_err().kind(), ErrorKind::InvalidArgument, "{addr:#x} {len}");
        }
    }

    #[test]
    fn slices_are_checked() {
        let range = raw(0x1000, 100).unwrap();
        let part = range.slice(10..20).unwrap();
        assert_eq!((part.addr().raw(), part.len()), (0x100a, 10));
        assert_eq!(range.slice(..=99).unwrap().len(), 100);
        assert_eq!(range.slice(90..101).unwrap_err().kind(), ErrorKind::OutOfBounds);
        #[allow(clippy::reversed_empty_ranges, reason = "the point of the check")]
        let reversed = range.slice(20..10);
        assert_eq!(reversed.unwrap_err().kind(), ErrorKind::OutOfBounds);
        assert_eq!(range.slice(5..5).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(range.slice(..=usize::MAX).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn gpu_pages_round_both_ends() {
        let pages = |addr, len| {
            let pages = Span::new("pin", GpuAddr(addr), len).unwrap().gpu_pages("pin").unwrap();
            (pages.addr.raw(), pages.len)
        };
        assert_eq!(pages(0x3_0000, 0x1_0000), (0x3_0000, 0x1_0000));
        assert_eq!(pages(0x3_0000, 0x1_0008), (0x3_0000, 0x2_0000));
        assert_eq!(pages(0x3_ffff, 1), (0x3_0000, 0x1_0000));
        assert_eq!(pages(0x3_ffff, 2), (0x3_0000, 0x2_0000));
        // The first page of all has no address that a span could start at.
        assert!(Span::new("pin", GpuAddr(8), 8).unwrap().gpu_pages("pin").is_err());
    }

    proptest! {
        #[test]
        fn page_cover_covers_and_is_tight(addr in 0u64..1 << 48, len in 1usize..1 << 40, shift in 12u32..22) {
            let page = 1usize << shift;
            let (head, total) = page_cover(addr, len, page).unwrap();
            prop_assert!(head < page && total % page == 0);
            prop_assert!(head + len <= total && total - (head + len) < page);
        }

        #[test]
        fn page_cover_never_wraps(addr in any::<u64>(), len in any::<usize>()) {
            if let Some((head, total)) = page_cover(addr, len, 4096) {
                prop_assert!(head.checked_add(len).is_some_and(|end| end <= total));
            }
        }
    }
}
