//! The mapping of a pin, used by copies without a lock and taken away by unmap without waiting.
//!
//! A copy marks the window as in use (see `marks`) and then looks for the mapping. Unmap takes it out of sight and then looks
//! for marks. If there are some, which is an error of the caller, the mapping is left over for the last of those copies to
//! drop. No copy ever touches address space that is no longer this mapping's.

#![allow(unsafe_code, reason = "the mapping is read through a pointer that marks keep alive")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gdrcopy::Mapping;

use crate::marks;

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

/// Threads share it through a pointer, which hides from the compiler whether they may.
const _: fn() = || {
    fn is_shared_between_threads<T: Send + Sync>() {}
    is_shared_between_threads::<Mapped>();
};

/// Holds at most one mapping.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// What copies use. It, and `leftover`, own what they point to, and are changed under the lock.
    current: AtomicPtr<Mapped>,
    /// A mapping that was taken away while copies were at work.
    leftover: AtomicPtr<Mapped>,
    /// The pin that was given up with a mapping left over, or 0.
    orphan: Mutex<u64>,
}

/// What is left to do for the one who emptied a window.
#[derive(Debug, Default)]
pub(crate) struct Reaped {
    pub(crate) mapped: Option<Box<Mapped>>,
    /// The pin that was given up before, and whose place is free only now.
    pub(crate) orphan: Option<u64>,
}

impl Window {
    /// Puts a mapping in; gives it back while there is one, or copies of an earlier one are at work.
    pub(crate) fn install(&self, mapped: Box<Mapped>) -> Result<(), Box<Mapped>> {
        let mut orphan = lock(&self.orphan);
        drop(self.reap_locked(&mut orphan));
        let taken = |place: &AtomicPtr<Mapped>| !place.load(Ordering::Relaxed).is_null();
        if taken(&self.current) || taken(&self.leftover) {
            return Err(mapped);
        }
        self.current.store(Box::into_raw(mapped), Ordering::Release);
        Ok(())
    }

    /// What marks call this window: it never moves while it is in use.
    fn name(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Runs `copy` on the mapping of the pin `handle`; `None` if there is none, or not any more.
    #[inline]
    pub(crate) fn with<R>(&self, handle: u64, copy: impl FnOnce(&Mapped) -> R) -> Option<R> {
        marks::marked(self.name(), || {
            let current = self.current.load(Ordering::Acquire);
            // SAFETY: null, or made by `install` from a box. `reap_locked` frees a mapping only after it was taken out of
            // `current` and then no thread had a mark for this window. This thread's mark was set before the load above:
            // either it is seen there, or the load no longer saw the mapping.
            let mapped = unsafe { current.as_ref() }?;
            (mapped.handle == handle).then(|| copy(mapped))
        })
        .flatten()
    }

    /// Whether the last copy to leave has something to reap. To be asked after `with`.
    #[inline]
    pub(crate) fn has_leftover(&self) -> bool {
        !self.leftover.load(Ordering::Relaxed).is_null()
    }

    /// Takes the mapping away, or leaves that to the last copy at work.
    pub(crate) fn retire(&self) -> Option<Box<Mapped>> {
        let mut orphan = lock(&self.orphan);
        self.hide();
        self.reap_locked(&mut orphan).mapped
    }

    /// As `retire`, for a pin that is given up: whether its place is free already. If not, `reap` says when it is.
    pub(crate) fn retire_for_good(&self, handle: u64) -> (Option<Box<Mapped>>, bool) {
        let mut orphan = lock(&self.orphan);
        self.hide();
        let mapped = self.reap_locked(&mut orphan).mapped;
        let free = !self.has_leftover();
        if !free {
            *orphan = handle;
        }
        (mapped, free)
    }

    /// Takes what is left over, unless copies are still at work.
    #[cold]
    pub(crate) fn reap(&self) -> Reaped {
        self.reap_locked(&mut lock(&self.orphan))
    }

    fn hide(&self) {
        let current = self.current.swap(ptr::null_mut(), Ordering::AcqRel);
        if !current.is_null() {
            // `install` let nothing in while there was another.
            debug_assert!(!self.has_leftover());
            self.leftover.store(current, Ordering::Release);
        }
    }

    /// Under the lock, which `orphan` stands for, so that no window is filled again between the look and the taking.
    fn reap_locked(&self, orphan: &mut u64) -> Reaped {
        let leftover = self.leftover.load(Ordering::Acquire);
        if leftover.is_null() || !marks::unused(self.name()) {
            return Reaped::default();
        }
        self.leftover.store(ptr::null_mut(), Ordering::Release);
        // SAFETY: made by `install` from a box, taken out of both places, and in nobody's use.
        let mapped = Some(unsafe { Box::from_raw(leftover) });
        let orphan = std::mem::take(orphan);
        Reaped { mapped, orphan: (orphan != 0).then_some(orphan) }
    }
}

fn lock(mutex: &Mutex<u64>) -> MutexGuard<'_, u64> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Window {
    fn drop(&mut self) {
        for place in [&self.current, &self.leftover] {
            let mapped = place.swap(ptr::null_mut(), Ordering::AcqRel);
            if !mapped.is_null() {
                // SAFETY: made by `install` from a box; nobody else refers to a window that is dropped.
                drop(unsafe { Box::from_raw(mapped) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::thread;

    use gdrcopy::{BackendKind, Pinned, Session};

    use super::*;

    const BYTES: usize = 4096;

    fn pinned() -> (Session, Pinned<'static>) {
        marks::init();
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = std::sync::Arc::new(session.alloc(BYTES).unwrap());
        let pinned = session.pin(buffer).unwrap();
        (session, pinned)
    }

    fn mapped(handle: u64, pinned: &Pinned<'static>) -> Box<Mapped> {
        Box::new(Mapped { handle, mapping: pinned.map().unwrap(), first: 64, len: 128 })
    }

    /// As a copy of the C interface does it.
    fn with<R>(window: &Window, handle: u64, copy: impl FnOnce(&Mapped) -> R) -> Option<R> {
        let result = window.with(handle, copy);
        if window.has_leftover() {
            drop(window.reap());
        }
        result
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
        assert!(with(&window, 7, |_| ()).is_none());
        window.install(mapped(7, &pinned)).unwrap();
        assert!(with(&window, 7, |_| ()).is_some() && with(&window, 8, |_| ()).is_none());
        assert!(window.retire().is_some() && with(&window, 7, |_| ()).is_none());
    }

    #[test]
    fn a_copy_at_work_keeps_the_mapping_until_it_is_done() {
        let (session, pinned) = pinned();
        let window = Window::default();
        window.install(mapped(7, &pinned)).unwrap();
        with(&window, 7, |mapped| {
            assert!(window.retire().is_none(), "left to this copy");
            assert!(with(&window, 7, |_| ()).is_none(), "no new copy starts");
            mapped.mapping.write(64, b"still mapped").unwrap();
            assert_eq!(windows(&session), 1);
        });
        assert_eq!(windows(&session), 0);
        window.install(mapped(8, &pinned)).unwrap();
        assert!(with(&window, 8, |_| ()).is_some());
    }

    #[test]
    fn nothing_is_installed_over_a_mapping_in_use() {
        let (session, pinned) = pinned();
        let other = session.pin(std::sync::Arc::new(session.alloc(BYTES).unwrap())).unwrap();
        let window = Window::default();
        window.install(mapped(7, &pinned)).unwrap();
        with(&window, 7, |_| {
            window.retire();
            assert!(window.install(mapped(9, &other)).is_err());
        });
        window.install(mapped(9, &other)).unwrap();
    }

    #[test]
    fn the_place_of_a_pin_given_up_is_free_when_its_last_copy_is_done() {
        let (session, pinned) = pinned();
        let window = Window::default();
        window.install(mapped(7, &pinned)).unwrap();
        assert!(matches!(window.retire_for_good(7), (Some(_), true)));
        window.install(mapped(8, &pinned)).unwrap();
        window.with(8, |_| {
            assert!(matches!(window.retire_for_good(8), (None, false)));
            assert!(window.reap().mapped.is_none(), "still at work");
        });
        assert!(window.has_leftover() && windows(&session) == 1);
        let reaped = window.reap();
        assert!(reaped.mapped.is_some() && reaped.orphan == Some(8));
        assert!(window.reap().orphan.is_none());
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
                        if with(&window, 7, |mapped| mapped.mapping.write(64, &[1; 64]).unwrap()).is_some() {
                            copies.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            let mut rounds = 0;
            while rounds < 2000 || copies.load(Ordering::Relaxed) < 2000 {
                // While a copy still holds the last mapping the pin cannot be mapped again.
                let Ok(mapping) = pinned.map() else { continue };
                let fresh = Box::new(Mapped { handle: 7, mapping, first: 64, len: 128 });
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
