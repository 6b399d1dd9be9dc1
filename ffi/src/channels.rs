//! `gdrx_channel_t`, `gdrx_mailbox_t` and `gdrx_latest_t`: messages to and from a kernel that runs.

use std::time::Duration;

use gdrcopy::channel::{ChannelBuilder, Control, DeviceLatest, Latest, Mailbox, Receiver, Sender};

use crate::failure::Failure;
use crate::sessions;
use crate::table::Table;
use crate::types::ChannelOptions;

static CHANNELS: Table<Control, Sender, Receiver> = Table::new("channel");
static MAILBOXES: Table<Control, Questions> = Table::new("mailbox");
static LATESTS: Table<DeviceLatest, Newest> = Table::new("value");

/// A mailbox, and the lengths of what C's pointers point to.
pub(crate) struct Questions {
    pub(crate) mailbox: Mailbox<[u8], [u8]>,
    pub(crate) request_bytes: usize,
    pub(crate) response_bytes: usize,
}

/// A value that is replaced, and its length.
pub(crate) struct Newest {
    pub(crate) latest: Latest<[u8]>,
    pub(crate) bytes: usize,
}

/// `gdrx_placement_t`.
const IN_GPU: i32 = 0;
const IN_HOST: i32 = 1;

/// What C asks for; 0 leaves the default as it is.
fn builder(asked: &ChannelOptions) -> Result<ChannelBuilder, Failure> {
    let mut builder = ChannelBuilder::new();
    if let Some(gpu) = ordinal(asked.gpu)? {
        builder = builder.gpu(gpu);
    }
    if asked.lines_to_gpu != 0 {
        builder = builder.lines_to_gpu(asked.lines_to_gpu);
    }
    if asked.lines_to_host != 0 {
        builder = builder.lines_to_host(asked.lines_to_host);
    }
    if asked.readers != 0 {
        builder = builder.readers(asked.readers);
    }
    if asked.kernel_limit_ms != 0 {
        builder = builder.kernel_limit(Duration::from_millis(asked.kernel_limit_ms));
    }
    match asked.placement {
        IN_GPU => Ok(builder),
        IN_HOST => Ok(builder.ring_in_host_memory()),
        other => Err(Failure::invalid(format!("the option placement is {other}"))),
    }
}

/// A GPU as C names it: -1 is that of the calling thread's context, or 0.
pub(crate) fn ordinal(gpu: i32) -> Result<Option<usize>, Failure> {
    match gpu {
        -1 => Ok(None),
        _ => usize::try_from(gpu).map(Some).map_err(|_| Failure::invalid("gpu is neither a number of a GPU nor -1")),
    }
}

/// Asks the kernel to end and gives the memory up.
fn end<T>(table: &'static Table<Control, T>, handle: u64) -> Result<(), Failure>
where
    T: Send,
{
    table.destroy(handle, Control::stop, |_, _, ()| Ok(()))
}

pub(crate) mod channel {
    use super::*;

    pub(crate) fn create(session: u64, asked: &ChannelOptions) -> Result<u64, Failure> {
        let open = sessions::find(session)?;
        let (sender, receiver) = builder(asked)?.open(&open.session)?;
        CHANNELS.create(Some(&open), sender.control(), sender, receiver, destroy)
    }

    pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
        CHANNELS.destroy(handle, Control::stop, |_, _, _| Ok(()))
    }

    pub(crate) fn control(handle: u64) -> Result<Control, Failure> {
        CHANNELS.check_process(handle)?;
        CHANNELS.shared(handle, |control| Ok(control.clone()))
    }

    #[inline]
    pub(crate) fn send<R>(handle: u64, call: impl FnOnce(&mut Sender) -> Result<R, Failure>) -> Result<R, Failure> {
        CHANNELS.first(handle, call)
    }

    #[inline]
    pub(crate) fn recv<R>(handle: u64, call: impl FnOnce(&mut Receiver) -> Result<R, Failure>) -> Result<R, Failure> {
        CHANNELS.second(handle, call)
    }
}

pub(crate) mod mailbox {
    use super::*;

    pub(crate) fn create(
        session: u64,
        asked: &ChannelOptions,
        request_bytes: usize,
        response_bytes: usize,
    ) -> Result<u64, Failure> {
        let open = sessions::find(session)?;
        let (sender, receiver) = builder(asked)?.open(&open.session)?;
        let control = sender.control();
        let mailbox = Mailbox::with_sizes(sender, receiver, request_bytes, response_bytes)?;
        let questions = Questions { mailbox, request_bytes, response_bytes };
        MAILBOXES.create(Some(&open), control, questions, (), destroy)
    }

    pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
        end(&MAILBOXES, handle)
    }

    pub(crate) fn control(handle: u64) -> Result<Control, Failure> {
        MAILBOXES.check_process(handle)?;
        MAILBOXES.shared(handle, |control| Ok(control.clone()))
    }

    #[inline]
    pub(crate) fn with<R>(handle: u64, call: impl FnOnce(&mut Questions) -> Result<R, Failure>) -> Result<R, Failure> {
        MAILBOXES.first(handle, call)
    }
}

pub(crate) mod latest {
    use super::*;

    pub(crate) fn create(session: u64, gpu: i32, first: &[u8]) -> Result<u64, Failure> {
        let open = sessions::find(session)?;
        let latest = Latest::new(&open.session, ordinal(gpu)?, first)?;
        LATESTS.create(Some(&open), latest.device(), Newest { latest, bytes: first.len() }, (), destroy)
    }

    pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
        LATESTS.destroy(handle, |_| (), |_, _, ()| Ok(()))
    }

    pub(crate) fn device(handle: u64) -> Result<DeviceLatest, Failure> {
        LATESTS.check_process(handle)?;
        LATESTS.shared(handle, |device| Ok(*device))
    }

    #[inline]
    pub(crate) fn with<R>(handle: u64, call: impl FnOnce(&mut Newest) -> Result<R, Failure>) -> Result<R, Failure> {
        LATESTS.first(handle, call)
    }
}
