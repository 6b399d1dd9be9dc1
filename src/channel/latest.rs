//! The newest of a series of values, in GPU memory.

use std::fmt;
use std::marker::PhantomData;

use zerocopy::{Immutable, IntoBytes};

use super::layout::{LINE, LINE_PAYLOAD, PART, lines_of};
use super::memory::Far;
use super::part;
use super::post::LineStore;
use crate::copy::fence;
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;
use crate::sys::num::usize_of;
use crate::sys::process::Owner;

/// Values that lie beside each other, so that one can be read while the next is written.
pub(crate) const SLOTS: u32 = 4;
const MAX_LINES: u32 = 1 << 14;

/// A [`Latest`] as a kernel gets it: `struct gdrc_latest` in C, passed by value. Valid while the [`Latest`] lives.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceLatest {
    /// GPU memory (on emulated GPUs: an address of this process): 4 slots of `lines` lines.
    pub slots: u64,
    /// Lines of a value.
    pub lines: u32,
    /// The first version.
    pub start: u32,
}

const _: () = assert!(size_of::<DeviceLatest>() == 16);

impl DeviceLatest {
    /// The structure's 16 bytes as words, to be put among a kernel's arguments.
    #[must_use]
    pub fn to_words(&self) -> [u64; 2] {
        [self.slots, u64::from(self.start) << 32 | u64::from(self.lines)]
    }

    /// Byte offset of the slot that `version` lies in.
    #[inline]
    pub(crate) fn slot(&self, version: u32) -> usize {
        usize_of(u64::from(version % SLOTS) * u64::from(self.lines)) * LINE
    }
}

/// A value that this process keeps changing and a kernel reads whenever it likes: the newest one, never a mix of two.
///
/// Setting it is a 64-byte store for each 48 bytes, without a fence and without waiting for anybody. Values that no reader
/// looked at in time are gone. Each 16-byte part carries the version that it belongs to, a 32-bit number; `gdrc_latest_read`
/// takes a value only if all its parts carry the same, newest one. Of a value of several lines that is set without pause,
/// faster than a kernel can read four of them, a reader may never catch a whole one.
///
/// Keep it until the kernels that read it have ended: dropping it takes the memory away and does not wait for them.
///
/// A reader that sleeps through 2^31 values cannot tell what is newer.
///
/// `Latest<[u8]>` is for values whose length is known at run time only; all have the length of the first.
pub struct Latest<T: ?Sized> {
    far: Far,
    store: LineStore,
    device: DeviceLatest,
    version: u32,
    owner: Owner,
    bytes: usize,
    value: PhantomData<fn(&T)>,
}

impl<T: IntoBytes + Immutable + ?Sized> Latest<T> {
    /// Allocates device memory on this GPU (`None`: that of the calling thread's context, or GPU 0) and puts `first` there,
    /// which has arrived on return.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a value of more than 768 KiB; `UnsupportedFeature` for a processor without AVX, or without a
    /// whole-line store for write-combined memory; otherwise as [`Session::alloc_on`], [`Session::pin`] and
    /// [`Pinned::map`](crate::Pinned::map).
    pub fn new(session: &Session, gpu: Option<usize>, first: &T) -> Result<Self> {
        Self::starting_at(session, gpu, first, 0)
    }

    /// With the number of the first version, so that tests reach the end of 32 bits.
    #[doc(hidden)]
    pub fn starting_at(session: &Session, gpu: Option<usize>, first: &T, start: u32) -> Result<Self> {
        const OP: &str = "open latest";
        part::require_avx(OP)?;
        let bytes = size_of_val(first);
        let lines = u32::try_from(lines_of(bytes)).ok().filter(|lines| *lines <= MAX_LINES);
        let Some(lines) = lines else {
            let most = usize_of(u64::from(MAX_LINES)) * LINE_PAYLOAD;
            let cause = format!("a value of {bytes} bytes, of which {most} are the most");
            return Err(Error::new(OP, ErrorKind::InvalidArgument, cause).remedy("use Mapping::publish"));
        };
        let slot_bytes = usize_of(u64::from(lines)) * LINE;
        let (far, _) = Far::new(session, gpu, slot_bytes * usize_of(u64::from(SLOTS)))?;
        let store = LineStore::choose(OP, &far.mapping)?;
        let device = DeviceLatest { slots: far.addr, lines, start };
        // The other slots are those of earlier versions, which a reader never wants.
        for version in (1..SLOTS).map(|back| start.wrapping_sub(back)) {
            let mut bytes = vec![0; slot_bytes];
            for part in bytes.chunks_exact_mut(PART) {
                part[..4].copy_from_slice(&version.to_le_bytes());
            }
            far.fill(device.slot(version), &bytes)?;
        }
        let version = start.wrapping_sub(1);
        let mut latest = Self { far, store, device, version, owner: Owner::here(), bytes, value: PhantomData };
        latest.set(first)?;
        latest.far.mapping.flush()?;
        Ok(latest)
    }

    /// Replaces the value.
    ///
    /// # Errors
    ///
    /// `WrongProcess`; `InvalidArgument` if `T` is a slice and this one has another length than the first.
    #[inline]
    pub fn set(&mut self, value: &T) -> Result<()> {
        self.owner.check("set")?;
        if size_of_val(value) != self.bytes {
            return Err(other_length(size_of_val(value), self.bytes));
        }
        self.version = self.version.wrapping_add(1);
        let slot = self.far.mapping.as_ptr().wrapping_add(self.device.slot(self.version));
        let (whole, tail) = value.as_bytes().as_chunks::<LINE_PAYLOAD>();
        let mut last = [0; LINE_PAYLOAD];
        last[..tail.len()].copy_from_slice(tail);
        // A value of 0 bytes has one line, of zeros.
        let last = (!tail.is_empty() || whole.is_empty()).then_some(&last);
        for (index, payload) in whole.iter().chain(last).enumerate() {
            // SAFETY: a line of the slot, which starts on a line; the instructions were checked by `choose` and
            // `require_avx`.
            unsafe { self.store.line(slot.wrapping_add(index * LINE), self.version, payload) };
        }
        Ok(())
    }

    /// Sees off the value that was set last, as [`Sender::commit`](super::Sender::commit): for one that no other follows
    /// soon.
    #[inline]
    pub fn commit(&self) {
        fence::store();
    }

    /// What the kernel gets.
    #[must_use]
    pub fn device(&self) -> DeviceLatest {
        self.device
    }
}

#[cold]
fn other_length(found: usize, bytes: usize) -> Error {
    Error::new("set", ErrorKind::InvalidArgument, format!("a value of {found} bytes, and all have {bytes}"))
}

impl<T: ?Sized> fmt::Debug for Latest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latest").field("device", &self.device).field("version", &self.version).finish_non_exhaustive()
    }
}
