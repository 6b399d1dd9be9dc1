//! Backend `gdrdrv` and its module: what opens, which calls are made on which version, and what is refused.
//!
//! All of it runs over the stand-in, which has to be there from the start of a process: each test starts this program
//! again for itself, once for each setting, and reads the log that the stand-in keeps of the calls on the node.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error should stop there, with the error in its message")]

#[path = "../common/mod.rs"]
mod common;

mod again;
mod calls;
mod memory;
mod node;
mod opening;
