//! What a caller holds: one leaf's copies behind one type.

use std::fmt;

use zerocopy::{Immutable, IntoBytes};

use super::fixed::{self, Inlined, LineStore};
use super::kernel::{self, Leaf, Need};
use super::plan::LINE_BYTES;
use super::scalar;

/// One way of copying to and from device memory: a set of instructions with a name.
///
/// All instances are `'static`: [`preferred`](super::preferred) gives the best one of this machine,
/// [`by_name`](super::by_name) a chosen one, [`routines`](super::routines) all of them.
pub struct Routine {
    name: &'static str,
    needs: &'static [Need],
    inlined: Inlined,
    is_available: fn() -> bool,
    store: unsafe fn(*mut u8, *const u8, usize),
    load: unsafe fn(*mut u8, *const u8, usize),
}

impl fmt::Debug for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Routine").field(&self.name).finish()
    }
}

impl Routine {
    pub(super) const fn of<L: Leaf>() -> Self {
        Self {
            name: L::NAME,
            needs: L::NEEDS,
            inlined: Inlined::new(L::LINE),
            is_available: L::is_available,
            store: kernel::store::<L>,
            load: L::load,
        }
    }

    /// The name that [`by_name`](super::by_name) takes: `"scalar"`, `"sse41"`, `"avx2"`, `"avx512"` or `"movdir64b"`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether this processor has the instructions and the operating system keeps the registers they use.
    ///
    /// Calling any of the copies below where this is false is
    /// undefined behaviour (in practice: `SIGILL`).
    #[must_use]
    pub fn is_available(&self) -> bool {
        (self.is_available)()
    }

    /// Whether [`post_line`](Self::post_line) is one 64-byte write by architecture. True for `"movdir64b"` only: Intel
    /// SDM volume 2, MOVDIR64B, "64-byte write atomicity". A full line stored by the other routines nearly always
    /// leaves as one packet too, but nothing promises it.
    #[must_use]
    pub fn post_line_is_atomic(&self) -> bool {
        self.inlined.line == LineStore::DIRECT
    }

    /// Stores `src` at `dst`: every byte exactly once, no byte outside, no fence.
    ///
    /// A naturally aligned 1, 2, 4 or 8 bytes is one store instruction of that width. Other sizes are stored as whole
    /// 64-byte lines where the range covers a line, and else as masked or naturally aligned parts, in ascending order
    /// of instructions; on write-combined memory the bytes arrive in any order, and possibly not before a
    /// [`fence::store`](super::fence::store). An empty `src` touches nothing.
    ///
    /// # Safety
    ///
    /// - [`is_available`](Self::is_available) holds;
    /// - `dst` is valid for a store of `src.len()` bytes, of any alignment;
    /// - those bytes are not borrowed as a Rust reference anywhere, and do not overlap `src`.
    #[inline]
    pub unsafe fn store(&self, dst: *mut u8, src: &[u8]) {
        // SAFETY: the caller's duties are those of both callees.
        if !unsafe { scalar::store_single(dst, src) } {
            // SAFETY: as above; availability is the caller's first duty.
            unsafe { self.store_called(dst, src) };
        }
    }

    /// Loads `dst.len()` bytes at `src` into `dst`. What fences it has are for speed, and order nothing for the caller.
    ///
    /// A naturally aligned 1, 2, 4 or 8 bytes is one load instruction of that width. Other sizes fetch the whole
    /// 64-byte lines around the range, each once (`"scalar"`: the 8-byte words around it), in no order. Without fences
    /// the loads may be answered from before an earlier store, and out of order among calls; see the
    /// [module documentation](super). No byte outside `dst` is written, and an empty `dst` touches nothing.
    ///
    /// # Safety
    ///
    /// - [`is_available`](Self::is_available) holds;
    /// - the **whole 64-byte lines** that hold `dst.len()` bytes at `src` are valid for loads, and loading them has no
    ///   side effect. A line never crosses a page, so a range that is mapped page by page satisfies this;
    /// - those bytes are not borrowed as a mutable Rust reference anywhere.
    #[inline]
    pub unsafe fn load(&self, dst: &mut [u8], src: *const u8) {
        // SAFETY: the caller's duties are those of both callees.
        if !unsafe { scalar::load_single(dst, src) } {
            // SAFETY: as above; availability is the caller's first duty.
            unsafe { (self.load)(dst.as_mut_ptr(), src, dst.len()) };
        }
    }

    /// Stores a value's bytes: what [`store`](Self::store) does, as code of the caller's own where the size is 1 to 64
    /// bytes. No fence.
    ///
    /// Inlined it is the whole line at once for 64 bytes at a multiple of 64, and 16-byte pieces for 16, 32 and 48 bytes
    /// at a multiple of 16 (`"scalar"`: neither); else pieces of 8 bytes and then of 4, 2 and 1, which takes a `dst` that
    /// is a multiple of the largest of them. At any other address, and for larger values, the routine is called.
    ///
    /// # Safety
    ///
    /// As for [`store`](Self::store), for `size_of::<T>()` bytes.
    #[inline(always)]
    pub unsafe fn store_value<T: IntoBytes + Immutable>(&self, dst: *mut u8, value: &T) {
        // SAFETY: the caller's duties are those of both callees.
        if !unsafe { fixed::store_value(&self.inlined, dst, value) } {
            // SAFETY: as above.
            unsafe { self.store_called(dst, value.as_bytes()) };
        }
    }

    /// What it needs, for the error that says what is missing.
    pub(super) fn needs(&self) -> &'static [Need] {
        self.needs
    }

    /// For a mapping, which keeps it beside the address: one load less on the way to the store.
    pub(crate) fn inlined(&self) -> Inlined {
        self.inlined
    }

    /// [`store`](Self::store) for a caller that has looked for a single access already.
    ///
    /// # Safety
    ///
    /// As for [`store`](Self::store).
    #[inline]
    pub(crate) unsafe fn store_called(&self, dst: *mut u8, src: &[u8]) {
        // SAFETY: the same contract.
        unsafe { (self.store)(dst, src.as_ptr(), src.len()) };
    }

    /// Stores one whole line: with one instruction where the instruction set has one (`"avx512"`, `"movdir64b"`),
    /// else with back-to-back stores that fill the line. No fence, and none is needed for a full line to leave soon.
    ///
    /// # Safety
    ///
    /// - [`is_available`](Self::is_available) holds;
    /// - `dst` is a multiple of 64 and valid for a store of 64 bytes;
    /// - those bytes are not borrowed as a Rust reference anywhere.
    #[inline(always)]
    pub unsafe fn post_line(&self, dst: *mut u8, line: &[u8; LINE_BYTES]) {
        debug_assert!(dst.addr().is_multiple_of(LINE_BYTES), "line store at {dst:p}");
        // SAFETY: alignment, validity and availability are the caller's duties.
        if !unsafe { fixed::store_line(&self.inlined, dst, line.as_ptr()) } {
            // SAFETY: as above.
            unsafe { self.store_called(dst, line) };
        }
    }
}
