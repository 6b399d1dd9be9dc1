//! What the `gdrcopy_*` programs share: clock, samples, report, host facts, flags. No stable interface.
//!
//! A program is a thin `main` over one module here, so that its logic can be tested without a process.
//!
//! - [`rig`]: session, GPU, device memory and mapping, from the flags that all programs share; [`outputs`]: where results
//!   go, from theirs
//! - [`clock`] and [`stats`]: how a time is taken and what becomes of many of them
//! - [`measure`]: the two timed loops (back to back, one by one)
//! - [`ab`]: several ways of doing one thing, compared in interleaved blocks
//! - [`method`], [`bench`], [`series`]: the ways of copying, the measurement of one row, a table of them
//! - [`report`], [`table`], [`plot`], [`output`]: one set of results, its forms, and where they go; [`verdict`] and
//!   [`quickest`]: what they amount to
//! - [`host`], [`cpu`]: what the figures were measured on, and keeping the thread there
//! - [`flags`], [`fail`]: reading the command line, and the one line a person sees when it cannot be done;
//!   [`interrupt`]: Ctrl-C
//! - [`answer`] and [`exchange`]: a ping-pong with a kernel, seen from either side; [`echo`]: when the GPU sees a
//!   write; [`load`]: something else for the GPU to do
//! - [`pattern`]: data that shows a lost, doubled or misplaced byte
//! - [`sanity`], [`doctor`]: whether it works here, and why not

pub mod ab;
pub mod answer;
pub mod apiperf;
pub mod bench;
pub mod clock;
pub mod copybw;
pub mod copylat;
pub mod cpu;
pub mod doctor;
pub mod echo;
pub mod exchange;
pub mod fail;
pub mod flags;
pub mod host;
pub mod interrupt;
pub mod load;
pub mod measure;
pub mod method;
mod num;
pub mod output;
pub mod outputs;
pub mod pattern;
pub mod plot;
pub mod pplat;
pub mod quickest;
pub mod report;
pub mod rig;
pub mod sanity;
pub mod series;
pub mod stats;
pub mod table;
pub mod verdict;
