//! Whatever is quickest for the size.

use std::cell::RefCell;

use super::Method;
use crate::auto::AutoCopier;
use crate::error::Result;
use crate::tool::report::{Direction, Metric};

/// The method that an [`AutoCopier`] found to be the quickest.
#[derive(Debug)]
pub struct Auto<'a>(pub RefCell<AutoCopier<'a>>);

impl Auto<'_> {
    /// As in the report.
    pub const NAME: &'static str = "auto";
}

impl Method for Auto<'_> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn describe(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::HostToDevice => "AutoCopier::write (later writes are seen after it)",
            Direction::DeviceToHost => "AutoCopier::read",
        }
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::Single]
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.0.borrow_mut().write(offset, from)
    }

    #[inline(always)]
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.0.borrow_mut().read(offset, to)
    }

    fn settle(&self) -> Result<()> {
        self.0.borrow().mapping().flush()
    }
}
