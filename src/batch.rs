//! Posted writes that share a fence.

use zerocopy::{Immutable, IntoBytes};

use crate::copy::fence;
use crate::error::Result;
use crate::mapping::Mapping;

impl<'a> Mapping<'a> {
    /// Posted writes with one fence after the last of them, also when `writes` returns early or panics.
    ///
    /// # Errors
    ///
    /// What `writes` returns.
    #[inline]
    pub fn batch<R>(&self, writes: impl FnOnce(&Batch<'_, 'a>) -> Result<R>) -> Result<R> {
        writes(&Batch { mapping: self })
    }
}

/// Posted writes that are fenced together when the batch ends. Made by [`Mapping::batch`].
#[derive(Debug)]
pub struct Batch<'b, 'a> {
    mapping: &'b Mapping<'a>,
}

impl Batch<'_, '_> {
    /// [`Mapping::write_posted`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline(always)]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.mapping.write_posted(offset, from)
    }

    /// [`Mapping::write_value_posted`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::write`].
    #[inline(always)]
    pub fn write_value<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Result<()> {
        self.mapping.write_value_posted(offset, value)
    }

    /// [`Mapping::store_u32_posted`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline(always)]
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<()> {
        self.mapping.store_u32_posted(offset, value)
    }

    /// [`Mapping::store_u64_posted`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::store_u32`].
    #[inline(always)]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.mapping.store_u64_posted(offset, value)
    }

    /// [`Mapping::post_line`].
    ///
    /// # Errors
    ///
    /// As [`Mapping::post_line`].
    #[inline(always)]
    pub fn post_line(&self, offset: usize, line: &[u8; 64]) -> Result<()> {
        self.mapping.post_line(offset, line)
    }
}

impl Drop for Batch<'_, '_> {
    #[inline]
    fn drop(&mut self) {
        fence::store();
    }
}
