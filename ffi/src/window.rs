//! The mapping of a pin, used by copies without a lock and taken away by unmap without waiting.
//!
//! A copy holds the lock shared and only ever tries to get it: it neither waits nor makes a system call. Unmap marks the
//! window as retired and then drops the mapping, or, where copies are still at work (an error of the caller), leaves
//! that to the last of them. No copy ever touches address space that is no longer this mapping's.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{RwLock, RwLockWriteGuard, TryLockError};

use gdrcopy::Mapping;

/// A mapping and the part of it that copies may touch.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Of the pin.
    pub(crate) handle: u64,
    pub(crate) mapping: Mapping<'static>,
    /// Offset in the mapping of the first byte that may be touched.
    pub(crate) first: usize,
    pub(crate) len: usize,
}

impl Mapped {
    /// The offset in the mapping of `len` bytes at the address `at`, if they may be touched.
    pub(crate) fn offset(&self, at: usize, len: usize) -> Option<usize> {
        let offset = at.checked_sub(self.mapping.as_ptr().addr())?;
        let room = self.len.checked_sub(offset.checked_sub(self.first)?)?;
        (len <= room).then_some(offset)
    }
}

/// Holds at most one mapping.
#[derive(Debug, Default)]
pub(crate) struct Window {
    mapped: RwLock<Option<Mapped>>,
    retired: AtomicBool,
}

impl Window {
    fn try_write(&self) -> Option<RwLockWriteGuard<'_, Option<Mapped>>> {
        match self.mapped.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poison)) => Some(poison.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Puts a mapping in; gives it back while copies of an earlier one are at work.
    pub(crate) fn install(&self, mapped: Mapped) -> Result<(), Mapped> {
        match self.try_write() {
            Some(mut place) if place.is_none() => {
                self.retired.store(false, Ordering::Relaxed);
                *place = Some(mapped);
                Ok(())
            }
            _ => Err(mapped),
        }
    }

    /// Runs `copy` on the mapping of the pin `handle`; `None` if there is none, or not any more.
    #[inline]
    pub(crate) fn with<R>(&self, handle: u64, copy: impl FnOnce(&Mapped) -> R) -> Option<R> {
        let place = match self.mapped.try_read() {
            Ok(place) => place,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let mapped = place.as_ref().filter(|mapped| mapped.handle == handle && !self.retired.load(Ordering::Relaxed));
        let result = mapped.map(copy);
        drop(place);
        // Either this sees that the window was retired, or `retire` saw that the lock is free.
        fence(Ordering::SeqCst);
        if self.retired.load(Ordering::Relaxed) {
            drop(self.reap());
        }
        result
    }

    /// Takes the mapping out, or leaves that to the last copy at work.
    pub(crate) fn retire(&self) -> Option<Mapped> {
        self.retired.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.reap()
    }

    #[cold]
    fn reap(&self) -> Option<Mapped> {
        let mut place = self.try_write()?;
        // The window may have been filled again since the caller looked.
        if self.retired.load(Ordering::Relaxed) { place.take() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use gdrcopy::{BackendKind, Pinned, Session};

    use super::*;

    const BYTES: usize = 4096;

    fn pinned() -> (Session, Pinned<'static>) {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = std::sync::Arc::new(session.alloc(BYTES).unwrap());
        let pinned = session.pin(buffer).unwrap();
        (session, pinned)
    }

    fn mapped(handle: u64, pinned: &Pinned<'static>) -> Mapped {
        Mapped { handle, mapping: pinned.map().unwrap(), first: 64, len: 128 }
    }

    fn windows(session: &Session) -> usize {
        session.emulated().unwrap().live().windows
    }

    #[test]
    fn offsets_are_those_of_the_part() {
        let (_session, pinned) = pinned();
        let mapped = mapped(1, &pinned);
        let base = mapped.mapping.as_ptr().addr();
        assert_eq!(mapped.offset(base + 64, 128), Some(64));
        assert_eq!(mapped.offset(base + 191, 1), Some(191));
        assert_eq!(mapped.offset(base + 192, 0), Some(192));
        let outside =
            [(base + 63, 1), (base + 64, 129), (base + 192, 1), (base - 1, 1), (0, 0), (base + 65, usize::MAX)];
        for (at, len) in outside {
            assert_eq!(mapped.offset(at, len), None, "{at:#x} {len}");
        }
    }

    #[test]
    fn another_pins_handle_finds_nothing() {
        let (_session, pinned) = pinned();
        let window = Window::default();
        assert!(window.with(7, |_| ()).is_none());
        window.install(mapped(7, &pinned)).unwrap();
        assert!(window.with(7, |_| ()).is_some() && window.with(8, |_| ()).is_none());
        assert!(window.retire().is_some() && window.with(7, |_| ()).is_none());
    }

    #[test]
    fn a_copy_at_work_keeps_the_mapping_until_it_is_done() {
        let (session, pinned) = pinned();
        let window = Window::default();
        window.install(mapped(7, &pinned)).unwrap();
        window.with(7, |mapped| {
            assert!(window.retire().is_none(), "left to this copy");
            assert!(window.with(7, |_| ()).is_none(), "no new copy starts");
            mapped.mapping.write(64, b"still mapped").unwrap();
            assert_eq!(windows(&session), 1);
        });
        assert_eq!(windows(&session), 0);
        window.install(mapped(8, &pinned)).unwrap();
        assert!(window.with(8, |_| ()).is_some());
    }

    #[test]
    fn nothing_is_installed_over_a_mapping_in_use() {
        let (session, pinned) = pinned();
        let other = session.pin(std::sync::Arc::new(session.alloc(BYTES).unwrap())).unwrap();
        let window = Window::default();
        window.install(mapped(7, &pinned)).unwrap();
        window.with(7, |_| {
            window.retire();
            assert!(window.install(mapped(9, &other)).is_err());
        });
        window.install(mapped(9, &other)).unwrap();
    }

    #[test]
    fn copies_race_with_unmap_and_nothing_is_left() {
        let (session, pinned) = pinned();
        let window = Window::default();
        let copies = AtomicUsize::new(0);
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if window.with(7, |mapped| mapped.mapping.write(64, &[1; 64]).unwrap()).is_some() {
                            copies.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            let mut rounds = 0;
            while rounds < 2000 || copies.load(Ordering::Relaxed) < 2000 {
                // While a copy still holds the last mapping the pin cannot be mapped again.
                let Ok(mapping) = pinned.map() else { continue };
                let fresh = Mapped { handle: 7, mapping, first: 64, len: 128 };
                if window.install(fresh).is_ok() {
                    rounds += 1;
                    drop(window.retire());
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(windows(&session), 0);
    }
}
