//! Host memory that the kernel reaches: found by its address on the CPU's side.

use crate::error::{Error, ErrorKind, Result};
use crate::sys::num::u64_of;

/// Host addresses, and the kernel's address of the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: usize,
    end: usize,
    addr: u64,
    /// A program registered it, and may take it back.
    is_registered: bool,
}

/// Spans in ascending order, none of which overlap.
#[derive(Debug, Default)]
pub(super) struct Reach {
    spans: Vec<Span>,
    /// Where the first begins and the last ends: most other memory is outside.
    start: usize,
    end: usize,
}

fn invalid(cause: String, remedy: &'static str) -> Error {
    Error::new("agent", ErrorKind::InvalidArgument, cause).remedy(remedy)
}

impl Reach {
    /// Where the kernel finds these bytes, all of which lie in one span. A few comparisons.
    #[inline]
    pub(super) fn find(&self, start: usize, bytes: usize) -> Option<u64> {
        if start < self.start || start >= self.end {
            return None;
        }
        self.among(start, bytes)
    }

    fn among(&self, start: usize, bytes: usize) -> Option<u64> {
        let before = self.spans.partition_point(|span| span.start <= start).checked_sub(1)?;
        let span = self.spans.get(before)?;
        let is_inside = start < span.end && bytes <= span.end - start;
        is_inside.then(|| span.addr + u64_of(start - span.start))
    }

    /// Whether these bytes could be added.
    pub(super) fn check(&self, start: usize, bytes: usize) -> Result<()> {
        if start == 0 || bytes == 0 {
            return Err(invalid(format!("{bytes} bytes of host memory at {start:#x}"), "register at least 1 byte"));
        }
        let end = start.checked_add(bytes).ok_or_else(|| {
            let cause = format!("{bytes} bytes of host memory at {start:#x} reach past the end of all memory");
            invalid(cause, "correct the length")
        })?;
        match self.spans.iter().find(|span| span.start < end && start < span.end) {
            None => Ok(()),
            Some(span) => {
                let cause = format!(
                    "{bytes} bytes of host memory at {start:#x}: {} bytes at {:#x} are registered, or a host buffer",
                    span.end - span.start,
                    span.start
                );
                Err(invalid(cause, "register memory once; a host buffer is reached without that"))
            }
        }
    }

    /// Adds bytes that were checked.
    pub(super) fn add(&mut self, start: usize, bytes: usize, addr: u64, is_registered: bool) {
        let at = self.spans.partition_point(|span| span.start < start);
        self.spans.insert(at, Span { start, end: start + bytes, addr, is_registered });
        self.settle();
    }

    /// Takes back what was registered.
    pub(super) fn remove(&mut self, start: usize) -> Result<()> {
        let found = self.spans.iter().position(|span| span.start == start && span.is_registered);
        let at = found.ok_or_else(|| {
            invalid(
                format!("no memory was registered that begins at {start:#x}"),
                "name the first byte of what was registered",
            )
        })?;
        self.spans.remove(at);
        self.settle();
        Ok(())
    }

    fn settle(&mut self) {
        self.start = self.spans.first().map_or(0, |span| span.start);
        self.end = self.spans.last().map_or(0, |span| span.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_that_lie_in_one_span() {
        let mut reach = Reach::default();
        assert_eq!((reach.find(0, 0), reach.find(1, 1), reach.find(usize::MAX, 1)), (None, None, None));
        // The first two touch.
        for (start, bytes, addr) in [(5000, 1000, 70), (1000, 4000, 9000), (8000, 1, 500)] {
            reach.check(start, bytes).unwrap();
            reach.add(start, bytes, addr, true);
        }
        assert_eq!(reach.find(1000, 4000), Some(9000));
        assert_eq!(reach.find(4999, 1), Some(9000 + 3999));
        assert_eq!(reach.find(5001, 999), Some(71));
        assert_eq!(reach.find(8000, 1), Some(500));
        for (start, bytes) in [(999, 2), (999, 1), (4999, 2), (1000, 4001), (5999, 2), (6000, 1), (8000, 2), (8001, 1)]
        {
            assert_eq!(reach.find(start, bytes), None, "{bytes} at {start}");
        }
        assert_eq!(reach.find(2000, usize::MAX), None);
        reach.remove(1000).unwrap();
        assert_eq!((reach.find(1000, 1), reach.find(5000, 1)), (None, Some(70)));
        assert_eq!(reach.remove(1000).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn what_cannot_be_registered_is_refused() {
        let mut reach = Reach::default();
        reach.add(1000, 100, 1, false);
        for (start, bytes) in [(0, 10), (10, 0), (1000, 100), (900, 101), (1099, 1), (1050, 10), (900, 900)] {
            assert_eq!(reach.check(start, bytes).unwrap_err().kind(), ErrorKind::InvalidArgument, "{bytes} at {start}");
        }
        assert!(reach.check(usize::MAX, 2).unwrap_err().to_string().contains("past the end"));
        reach.check(900, 100).unwrap();
        reach.check(1100, 100).unwrap();
        assert!(reach.remove(1000).is_err(), "a host buffer stays");
    }
}
