//! `libgdrapi.so.2`: the C interface of `gdrcopy`, with the names, types, values and errors of libgdrapi 2.6, and more
//! under the prefix `gdrx_`. What callers may rely on is written in `include/gdrapi.h` and `include/gdrapi_ext.h`.
//!
//! ```text
//! abi, ext ──► sessions ──► pins ──► window ──► marks    entry points; tables; the mapping that copies use
//!    ├─────► failure        ├─ slab ─┘          │       panics and errors; handles
//!    └─────────────────── copiers ──────────────┘       threads that share copies
//! ```
//!
//! C's pointers are dealt with in `abi`, `ext` and `ext_copies` alone. Behind them the code is safe but for two things:
//! `window` and `copiers` read what `marks` keep alive, and that memory stays allocated while it is mapped is the C caller's promise.

pub mod abi;
mod copiers;
mod cost;
pub mod ext;
pub mod ext_copies;
pub mod failure;
mod log;
mod marks;
mod pins;
mod sessions;
mod slab;
pub mod types;
mod window;
