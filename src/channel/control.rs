//! What any thread may do with a channel, whoever uses its ends.

use std::sync::Arc;

use super::layout::DeviceChannel;
use super::memory::Shared;

/// The kernel's state, and the way to end it, for threads that use neither end: [`Sender::control`](super::Sender::control).
///
/// It keeps the channel's memory, as the two ends do.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// What the kernel gets.
    #[must_use]
    pub fn device(&self) -> DeviceChannel {
        self.shared.device
    }

    /// Asks the kernel to end; in a forked child it does nothing. Whoever waits for the kernel learns of its end.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// Whether every reader in the kernel has reported that it runs (or, since then, that it ended).
    #[must_use]
    pub fn kernel_has_started(&self) -> bool {
        self.shared.has_started()
    }

    /// Whether every reader in the kernel has reported its end.
    #[must_use]
    pub fn kernel_has_ended(&self) -> bool {
        self.shared.is_gone()
    }
}
