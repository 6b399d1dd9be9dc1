//! Copies to and from write-combined memory, with the best instructions the processor has.
//!
//! This is the engine under a mapping's reads and writes, and it works on any device window: all it wants is a pointer.
//! Whoever holds a mapping need not come here.
//!
//! ```
//! use gdrcopy::copy;
//!
//! /// Stands in for a mapped window.
//! #[repr(align(64))]
//! struct Window([u8; 256]);
//!
//! let mut window = Window([0; 256]);
//! let device = window.0.as_mut_ptr();
//! let routine = copy::preferred();
//!
//! // SAFETY: the window holds these ranges and the whole lines around them, and nothing borrows it meanwhile.
//! unsafe {
//!     routine.store(device.add(3), b"some payload");
//!     copy::fence::store(); // the flag below is in another line: without this it could arrive first
//!     copy::store_u32(device.add(128).cast(), 1);
//! }
//!
//! let mut payload = [0; 12];
//! copy::fence::full(); // loads may be answered from before earlier stores
//! // SAFETY: as above.
//! unsafe { routine.load(&mut payload, device.add(3)) };
//! copy::fence::load(); // and may pass each other
//! assert_eq!(&payload, b"some payload");
//! ```
//!
//! # Routines
//!
//! A [`Routine`] is one instruction set's way of copying. [`preferred`] is resolved once per process;
//! [`by_name`] is what `GDRCOPY_COPY` selects with.
//!
//! | name | whole line, store | part of a line, store | load | needs |
//! |---|---|---|---|---|
//! | `scalar` | 8 x 8 bytes, ordinary | 1 to 8 bytes, aligned | 8-byte words | – |
//! | `sse41` | 4 x 16 bytes, non-temporal | 1 to 16 bytes, aligned | line, 4 x 16 bytes, non-temporal | SSE4.1 |
//! | `avx2` | 2 x 32 bytes, non-temporal | 1 to 16 bytes, aligned | line, 2 x 32 bytes, non-temporal | AVX2 |
//! | `avx512` | 64 bytes, non-temporal | one masked store | line, 64 bytes, non-temporal | AVX-512 F, BW, VL |
//! | `movdir64b` | 64 bytes, direct, atomic | as the best of the above | as the best of the above | MOVDIR64B |
//!
//! Non-temporal is what makes loads fast: an ordinary load of write-combined memory fetches a few bytes per round trip
//! over the bus, while MOVNTDQA brings a whole line into a fill buffer (Intel SDM volume 1, "Streaming load hint
//! instruction"). Full lines are what makes stores fast: a write-combining buffer that is full leaves as one packet, a
//! partial one as up to eight (Intel SDM volume 3, "Write combining (WC) memory type"). Parts of a line are ordinary
//! stores, which such memory combines just as well.
//!
//! [`Routine::store_value`] and [`Routine::post_line`] are inlined into the caller instead: 8 bytes at a time, 16 where the
//! value has 16, 32 or 48, and a whole line at once with `avx512` and `movdir64b`, as four times 16 non-temporal bytes with
//! `sse41` and `avx2`.
//!
//! # What every routine promises
//!
//! - Device memory is touched by inline assembly alone, never through a reference. Concurrent copies of the same bytes,
//!   by other threads or by the device, are no data race; they may interleave.
//! - A naturally aligned access of 1, 2, 4 or 8 bytes, on the device side, is exactly one instruction of that width and
//!   does not tear. A device may wait for such a value.
//! - Every byte of a store is stored exactly once, and none outside the range, so a device never sees a value come back.
//! - A load fetches the whole 64-byte lines around its range, each once, all of them at the same time as far as the
//!   processor has buffers: a load inside one line is one round trip at any offset. Hence the duty that whole lines be
//!   loadable; since a line never crosses a page, a window made of whole pages always is.
//! - No allocation, no lock, no system call. Size 0 touches nothing.
//!
//! # Ordering
//!
//! Copies do not fence. Write-combined stores arrive in any order, a partly filled line possibly late; loads are weakly
//! ordered and may be answered before earlier stores have left. The [`fence`] module has the three that matter:
//!
//! | to make sure that | do |
//! |---|---|
//! | a flag arrives after the data | store data, [`fence::store`], store flag, [`fence::store`] |
//! | a partly filled line leaves now | [`fence::store`] |
//! | a load fetches afresh, as each look of a poll has to | [`fence::full`], then load |
//! | a second load is not older than a first | first, [`fence::load`], second |
//!
//! Fill buffers are the reason for the third: a line that a non-temporal load fetched may answer the next such load of it
//! too, however old it is by then (Intel SDM volume 2, MOVNTDQA).
//!
//! A fence costs as long as the write-combining buffers take to drain, far more than the stores themselves. Share one
//! among many stores where nothing needs to be ordered in between.

#![allow(unsafe_code, reason = "every access to device memory is an instruction written here, on the caller's pointer")]

pub mod fence;
pub(crate) mod fixed;
mod kernel;
mod parallel;
mod plan;
mod routine;
mod scalar;
#[cfg(test)]
mod tests;
mod x86_64;

pub(crate) use kernel::scalar_routine;
pub use kernel::{by_name, preferred, routines};
pub(crate) use parallel::largest_alone;
pub use parallel::{ParallelCopier, ParallelCopierBuilder};
pub(crate) use plan::LINE_BYTES;
pub use routine::Routine;
pub(crate) use scalar::{load_single, store_single};
pub use scalar::{load_u8, load_u16, load_u32, load_u64, store_u8, store_u16, store_u32, store_u64};
