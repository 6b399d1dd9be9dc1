//! Messages between a CPU thread and a kernel that keeps running, in both directions, without a CUDA call.
//!
//! ```text
//! Sender ──64-byte stores through BAR1──► ring in GPU memory ──► kernel
//! Receiver ◄── ring in pinned host memory ◄──16-byte stores over PCIe── kernel
//! ```
//!
//! [`ChannelBuilder::open`] makes the two rings and returns the CPU's ends. The kernel gets [`DeviceChannel`] by value and
//! uses the functions of `ffi/include/gdrcopy_channel.cuh`. On top of a channel, [`Mailbox`] asks typed questions with a
//! deadline; [`Latest`] shows a kernel the newest of a series of values.
//!
//! ```
//! use std::time::Duration;
//!
//! use gdrcopy::channel::{ChannelBuilder, Mailbox, peer};
//! use gdrcopy::{BackendKind, Session};
//!
//! # let session = Session::builder().backend(BackendKind::Emulated).open()?;
//! let (sender, receiver) = ChannelBuilder::new().open(&session)?;
//! // A kernel would be launched with this. On emulated GPUs a thread takes its place.
//! let device = sender.device();
//! let kernel = std::thread::spawn(move || {
//!     // SAFETY: the thread is joined before the channel is dropped.
//!     unsafe { peer::answer::<[u64; 4], u64>(&device, |request| request.iter().sum()) }
//! });
//! let mut mailbox = Mailbox::<[u64; 4], u64>::new(sender, receiver)?;
//! assert_eq!(mailbox.call(&[1, 2, 3, 4], Duration::from_secs(10))?, 10);
//! mailbox.stop();
//! kernel.join().expect("no panic");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Lines
//!
//! Both rings are made of 64-byte lines. A line has four parts of 16 bytes, and a part has a 32-bit sequence number and
//! 12 bytes of payload, which makes 48 bytes of payload in a line:
//!
//! | byte | 0 | 4 | 16 | 20 | 32 | 36 | 48 | 52 |
//! |---|---|---|---|---|---|---|---|---|
//! | | number | payload 0-11 | number | payload 12-23 | number | payload 24-35 | number | payload 36-47 |
//!
//! Lines are numbered without a gap, modulo 2^32, and line `n` lies in slot `n mod` the number of slots, a power of two.
//! A part belongs to line `n` if it carries `n`, whatever the other parts carry: the line is stored as one packet, but
//! the four 16-byte loads by which a kernel reads it are four moments. Before a channel is handed out, every part of both
//! rings is given the number that it would have had a lap before the first, and the GPU's ring is read back. So memory
//! that an earlier channel used is never taken for a message.
//!
//! A ring has one writer. The reader returns credit, the number of the first line that it has not consumed, whenever a
//! quarter of the ring has been consumed; the writer looks at the credit only when the room that it knows of runs out.
//!
//! # Messages
//!
//! - *Lines*: [`Sender::send_line`], [`Sender::try_send_lines`] and [`Receiver::recv_line`] move 48 bytes each.
//! - *Any length*: [`Sender::send`] and [`Receiver::recv`] put a 32-bit length before the bytes and fill as many lines as
//!   that takes, up to half a ring. Both ends must use the same kind.
//!
//! None is lost, duplicated, reordered or mixed up with another. What a ring has no room for is not sent: the `try_`
//! functions say [`ChannelError::Full`], the others wait until their timeout.
//!
//! # What it needs
//!
//! A processor with AVX, for which a 16-byte load is one access (Intel SDM volume 3A, 9.1.1), and on write-combined memory
//! a whole-line store, AVX-512 or MOVDIR64B: a line gathered from smaller stores may leave in pieces of 8 bytes.
//!
//! # Latency
//!
//! While a kernel waits, it looks at GPU memory only, and between a message and its answer it has no fence to wait for. A
//! line that is posted may stay in the processor's write-combining buffers until more is stored: [`Mailbox::call`] sees it
//! off with SFENCE, and for [`Sender`] there is [`Sender::commit`]. A kernel that shares its SM with other work loses time
//! to it with every instruction; `gdrcopy::cuda::Kernel::alone_on_its_sm` keeps others off.
//!
//! # Ordering
//!
//! Messages of one ring arrive in order. They order nothing else: data that a message refers to must be written with
//! [`Mapping::write`](crate::Mapping::write), which fences, before the message is sent, and a kernel that passes other
//! memory on puts `__threadfence_system()` before its message.

#![allow(unsafe_code, reason = "rings in device and host memory, shared with a kernel, are reached by raw pointers")]

mod builder;
mod control;
mod error;
mod latest;
mod layout;
mod mailbox;
mod memory;
mod part;
#[doc(hidden)]
pub mod peer;
mod post;
mod receiver;
mod sender;
mod wait;

pub use builder::ChannelBuilder;
pub use control::Control;
pub use error::ChannelError;
pub use latest::{DeviceLatest, Latest};
pub use layout::{DeviceChannel, LINE_PAYLOAD};
pub use mailbox::Mailbox;
pub use receiver::Receiver;
pub use sender::Sender;
