//! `libgdrapi.so.2`: the C interface of `gdrcopy`, with the names, types, values and errors of libgdrapi 2.6, and more
//! under the prefix `gdrx_`. What callers may rely on is written in `include/gdrapi.h` and `include/gdrapi_ext.h`.
//!
//! ```text
//! abi, ext* ──► sessions ──► pins ──► window ──► marks    entry points; tables; the mapping that copies use
//!    ├─────► failure          ├─ slab ─┘          │       panics and errors; handles
//!    └─────► copiers, agents, autos, channels ─► table    what other handles stand for
//! ```
//!
//! C's pointers are dealt with in `abi`, the `ext` files and `pointers` alone. Behind them the code is safe but for three
//! things: `window` and `table` read what `marks` keep alive, `autos` keeps a buffer beside what borrows it, and that memory
//! stays allocated while it is mapped, or an agent's, is the C caller's promise.

pub mod abi;
mod agents;
mod autos;
mod channels;
mod copiers;
mod cost;
pub mod ext;
pub mod ext_agent;
pub mod ext_channel;
pub mod ext_copies;
pub mod ext_mailbox;
pub mod failure;
mod log;
mod marks;
mod part;
mod pins;
mod pointers;
mod sessions;
mod slab;
mod table;
pub mod types;
mod window;
