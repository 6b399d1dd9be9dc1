//! What has a size of its own: words, values of a type, and whole lines.
//!
//! The compiler knows these sizes, so checks and stores become part of the caller's code.

#![allow(unsafe_code, reason = "stores into and loads from the window once the place was checked")]

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::copy::{self, fence, fixed};
use crate::error::Result;
use crate::mapping::Mapping;

impl Mapping<'_> {
    /// Stores 4 bytes with one access at an offset where the device address is a multiple of 4, then fences.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::write`].
    #[inline(always)]
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<()> {
        self.store_u32_posted(offset, value)?;
        fence::store();
        Ok(())
    }

    /// Stores 8 bytes with one access at an offset where the device address is a multiple of 8, then fences.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline(always)]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.store_u64_posted(offset, value)?;
        fence::store();
        Ok(())
    }

    /// [`Mapping::store_u32`] without the fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline(always)]
    pub fn store_u32_posted(&self, offset: usize, value: u32) -> Result<()> {
        let dst = self.aligned("store_u32", offset, 4)?;
        // SAFETY: in the live window and aligned.
        unsafe { copy::store_u32(dst.cast(), value) };
        Ok(())
    }

    /// [`Mapping::store_u64`] without the fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline(always)]
    pub fn store_u64_posted(&self, offset: usize, value: u64) -> Result<()> {
        let dst = self.aligned("store_u64", offset, 8)?;
        // SAFETY: in the live window and aligned.
        unsafe { copy::store_u64(dst.cast(), value) };
        Ok(())
    }

    /// Loads 4 bytes with one access at an offset where the device address is a multiple of 4. Fenced as
    /// [`Mapping::read`]: fit to be polled, and what is read afterwards is no older than the value.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::read`].
    #[inline(always)]
    pub fn load_u32(&self, offset: usize) -> Result<u32> {
        let src = self.aligned("load_u32", offset, 4)?;
        fence::full();
        // SAFETY: in the live window and aligned.
        let value = unsafe { copy::load_u32(src.cast()) };
        fence::load();
        Ok(value)
    }

    /// Loads 8 bytes with one access at an offset where the device address is a multiple of 8. Fenced as
    /// [`Mapping::load_u32`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::load_u32`].
    #[inline(always)]
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        let src = self.aligned("load_u64", offset, 8)?;
        fence::full();
        // SAFETY: in the live window and aligned.
        let value = unsafe { copy::load_u64(src.cast()) };
        fence::load();
        Ok(value)
    }

    /// Writes a value's bytes, each once, then fences (`SFENCE`): [`Mapping::write`] for types without padding.
    ///
    /// For a type of 1 to 64 bytes the stores become part of the caller's code, behind the checks: no call, no loop. That
    /// takes a device address which is a multiple of 8, or of the largest of 1, 2 and 4 that a smaller size holds. At a
    /// multiple of 64 a value of 64 bytes is stored as [`Mapping::post_line`] stores a line, and 16, 32 and 48 bytes at a
    /// multiple of 16 go 16 at a time: lay messages out accordingly. At any other address, and for larger types, the value
    /// is written as [`Mapping::write`] does it.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline(always)]
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Result<()> {
        let dst = self.at("write_value", offset, size_of::<T>())?;
        // SAFETY: `at` proved that the bytes lie in the live window.
        if unsafe { fixed::store_value(&self.inlined, dst, value) } {
            fence::store();
            Ok(())
        } else {
            // SAFETY: as above.
            unsafe { self.store_called(dst, value.as_bytes(), true) }
        }
    }

    /// [`Mapping::write_value`] without the fence, as [`Mapping::write_posted`] is without it: a value of 64 bytes at a
    /// multiple of 64 leaves by itself, a smaller one possibly not before a later fence.
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline(always)]
    pub fn write_value_posted<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Result<()> {
        let dst = self.at("write_value_posted", offset, size_of::<T>())?;
        // SAFETY: `at` proved that the bytes lie in the live window.
        if unsafe { fixed::store_value(&self.inlined, dst, value) } {
            Ok(())
        } else {
            // SAFETY: as above.
            unsafe { self.store_called(dst, value.as_bytes(), false) }
        }
    }

    /// Reads a value: [`Mapping::read`] for types that any bytes make valid.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read`].
    #[inline]
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T> {
        let mut value = T::new_zeroed();
        self.read(offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Stores one whole 64-byte line, without a fence, at an offset where the device address is a multiple of 64.
    ///
    /// Where [`Mapping::post_line_is_atomic`] says no, the line still leaves as one packet as a rule, but nothing
    /// guarantees it; and a reader's four 16-byte loads of one line are four moments in any case. Repeat a sequence
    /// number in each 16-byte part: such a part, loaded with one access, has been whole in every one of 10^10 lines posted on
    /// an H200 with the AVX-512 store while a kernel read them (`tests/gpu_soak.rs`).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if misaligned; otherwise as [`Mapping::write`].
    #[inline(always)]
    pub fn post_line(&self, offset: usize, line: &[u8; 64]) -> Result<()> {
        let dst = self.aligned("post_line", offset, 64)?;
        // SAFETY: in the live window and 64-byte aligned.
        if unsafe { fixed::store_line(&self.inlined, dst, line.as_ptr()) } {
            Ok(())
        } else {
            // SAFETY: as above.
            unsafe { self.store_called(dst, line, false) }
        }
    }

    /// Whether the processor guarantees that [`Mapping::post_line`] is one write: with MOVDIR64B (Intel SDM vol. 2).
    #[must_use]
    pub fn post_line_is_atomic(&self) -> bool {
        self.routine.post_line_is_atomic()
    }
}
