//! Typed questions to a kernel, with a deadline.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::error::ChannelError;
use super::layout::{DeviceChannel, lines_of, message_lines};
use super::memory::Shared;
use super::receiver::Receiver;
use super::sender::Sender;
use super::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::usize_of;

/// Asks a kernel and waits for its answer, for a limited time.
///
/// The kernel receives each request with `gdrc_recv_lines`, as many lines as [`Mailbox::request_lines`] says, and answers
/// each one, in order, with `gdrc_send_lines`, [`Mailbox::response_lines`] lines. A value lies in the payload of its lines
/// from the first byte on; what is left of the last line is 0.
///
/// A call that times out leaves its answer owed: when it comes it is dropped, and no later call is given it.
///
/// `Mailbox<[u8], [u8]>` is for questions and answers whose lengths are known at run time only:
/// [`Mailbox::with_sizes`], [`Mailbox::call_into`].
pub struct Mailbox<Req: ?Sized, Resp: ?Sized> {
    sender: Sender,
    receiver: Receiver,
    request_lines: u32,
    response_lines: u32,
    /// Answers that belong to calls which timed out.
    late: u64,
    types: PhantomData<fn(&Req, &mut Resp)>,
}

impl<Req: IntoBytes + Immutable, Resp: FromBytes + IntoBytes> Mailbox<Req, Resp> {
    /// Takes both ends of a channel over which nothing has been sent yet.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if these are ends of different channels, or of one with several readers; `OutOfBounds` if a value
    /// takes more than half of its ring.
    pub fn new(sender: Sender, receiver: Receiver) -> Result<Self> {
        Self::with_sizes(sender, receiver, size_of::<Req>(), size_of::<Resp>())
    }

    /// Sends a request and waits for its answer; never longer than about `timeout` for each of the two.
    ///
    /// # Errors
    ///
    /// `TimedOut`: the request was not sent for want of room, or its answer did not come. `KernelGone`: the kernel has
    /// ended without answering. `Failed(WrongProcess)`.
    #[inline]
    pub fn call(&mut self, request: &Req, timeout: Duration) -> Result<Resp, ChannelError> {
        let mut response = Resp::new_zeroed();
        self.call_into(request, &mut response, timeout)?;
        Ok(response)
    }
}

/// Looks for an answer before the store fence, which would hold up the first of them: some hundred nanoseconds, and an answer
/// takes a microsecond and a half.
const EARLY_LOOKS: u32 = 64;

impl<Req: IntoBytes + Immutable + ?Sized, Resp: FromBytes + IntoBytes + ?Sized> Mailbox<Req, Resp> {
    /// As [`Mailbox::new`], where the lengths of a request and of an answer, in bytes, are known at run time only.
    ///
    /// # Errors
    ///
    /// As [`Mailbox::new`].
    pub fn with_sizes(sender: Sender, receiver: Receiver, request_bytes: usize, response_bytes: usize) -> Result<Self> {
        const OP: &str = "open mailbox";
        if !Arc::ptr_eq(&sender.shared, &receiver.shared) {
            return Err(Error::new(OP, ErrorKind::InvalidArgument, "the two ends belong to different channels")
                .remedy("pass both that ChannelBuilder::open returned"));
        }
        let DeviceChannel { in_lines, out_lines, readers, .. } = sender.device();
        if readers != 1 {
            return Err(Error::new(
                OP,
                ErrorKind::InvalidArgument,
                format!("{readers} warps receive from the channel"),
            )
            .remedy("make one with 1 reader, and a mailbox for each warp"));
        }
        let request_lines = message_lines(OP, 0, request_bytes, in_lines)?;
        let response_lines = message_lines(OP, 0, response_bytes, out_lines)?;
        Ok(Self { sender, receiver, request_lines, response_lines, late: 0, types: PhantomData })
    }

    /// Lines of a request.
    #[must_use]
    pub fn request_lines(&self) -> u32 {
        self.request_lines
    }

    /// Lines of an answer.
    #[must_use]
    pub fn response_lines(&self) -> u32 {
        self.response_lines
    }

    /// What the kernel gets.
    #[must_use]
    pub fn device(&self) -> DeviceChannel {
        self.sender.device()
    }

    /// Asks the kernel to end. It notices within about a millisecond while it waits.
    pub fn stop(&self) {
        self.sender.stop();
    }

    /// Whether the kernel has reported that it runs (or, since then, that it ended).
    #[must_use]
    pub fn kernel_has_started(&self) -> bool {
        self.sender.kernel_has_started()
    }

    /// Answers that are owed to calls which timed out, and will be dropped.
    #[must_use]
    pub fn late_answers(&self) -> u64 {
        self.late
    }

    /// As [`Mailbox::call`], with a place for the answer. What it holds after an error is not specified.
    ///
    /// # Errors
    ///
    /// As [`Mailbox::call`]; `Failed(InvalidArgument)` if one of the two is a slice that fills another number of lines than
    /// the mailbox was made for.
    #[inline]
    pub fn call_into(&mut self, request: &Req, response: &mut Resp, timeout: Duration) -> Result<(), ChannelError> {
        self.sender.shared.owner.check("call")?;
        let lines = self.request_lines;
        if lines_of(size_of_val(request)) != usize_of(u64::from(lines))
            || lines_of(size_of_val(response)) != usize_of(u64::from(self.response_lines))
        {
            return Err(other_length(size_of_val(request), size_of_val(response)).into());
        }
        if !self.sender.has_room(lines) {
            // The kernel may be waiting for room itself, which dropping old answers gives.
            wait::until(self, Self::shared, timeout, |mailbox| {
                mailbox.drop_late();
                Ok(mailbox.sender.has_room(lines).then_some(()))
            })?;
        }
        self.sender.post_bytes(&[], request.as_bytes(), lines);
        self.sender.look_ahead(lines);
        // A whole line leaves by itself, as a rule at once. Should one stay, nothing else that is stored would see it off.
        let is_quick = (0..EARLY_LOOKS).any(|_| self.is_answered(response));
        let answer = if is_quick {
            Ok(())
        } else {
            self.sender.commit();
            wait::until(self, Self::shared, timeout, |mailbox| Ok(mailbox.is_answered(response).then_some(())))
        };
        match answer {
            Ok(()) => {
                self.receiver.consume(self.response_lines);
                Ok(())
            }
            Err(error) => {
                self.late += 1;
                Err(error)
            }
        }
    }

    /// Whether the answer to the last call is there, and in `response`.
    #[inline]
    fn is_answered(&mut self, response: &mut Resp) -> bool {
        self.drop_late();
        self.late == 0 && self.receiver.look_at_bytes(self.response_lines, 0, response.as_mut_bytes())
    }

    fn shared(&self) -> &Shared {
        &self.sender.shared
    }

    /// Consumes the answers to earlier calls, as far as they have come.
    #[inline]
    fn drop_late(&mut self) {
        while self.late > 0 && self.receiver.look_at_bytes(self.response_lines, 0, &mut []) {
            self.receiver.consume(self.response_lines);
            self.late -= 1;
        }
    }
}

#[cold]
fn other_length(request: usize, response: usize) -> Error {
    let cause = format!("a request of {request} bytes and an answer of {response} fill other lines than the mailbox's");
    Error::new("call", ErrorKind::InvalidArgument, cause).remedy("pass slices of the lengths that it was made for")
}

impl<Req: ?Sized, Resp: ?Sized> fmt::Debug for Mailbox<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("request_lines", &self.request_lines)
            .field("response_lines", &self.response_lines)
            .field("late", &self.late)
            .finish_non_exhaustive()
    }
}
