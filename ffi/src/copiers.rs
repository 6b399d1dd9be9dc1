//! `gdrx_copier_t`: parallel copiers.
//!
//! As with mappings, a copy marks the copier that it uses and takes no lock; destroying takes the copier out of sight and
//! waits for marks to go, which copies that race with it set, in error.

#![allow(unsafe_code, reason = "the copier is read through a pointer that marks keep alive")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::{ParallelCopier, ParallelCopierBuilder};

use crate::failure::{Failure, Kind};
use crate::marks;
use crate::slab::Slab;

static COPIERS: Slab<Place> = Slab::new();

/// How long destroying waits for copies at work: no copy takes that long.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Place {
    /// What copies use. It owns what it points to.
    current: AtomicPtr<Held>,
}

struct Held {
    handle: u64,
    copier: ParallelCopier,
}

/// Threads share it through a pointer, which hides from the compiler whether they may.
const _: fn() = || {
    fn is_shared_between_threads<T: Send + Sync>() {}
    is_shared_between_threads::<Held>();
};

impl Place {
    /// What marks call this place: it never moves.
    fn name(&self) -> usize {
        ptr::from_ref(self).addr()
    }
}

/// Starts the threads of a copier.
pub(crate) fn create(builder: &ParallelCopierBuilder) -> Result<u64, Failure> {
    let copier = builder.build()?;
    let full = || Failure::new(libc::EMFILE, Kind::OutOfMemory, "a million copiers are alive; destroy some");
    let (handle, place) = COPIERS.claim().ok_or_else(full)?;
    place.current.store(Box::into_raw(Box::new(Held { handle, copier })), Ordering::Release);
    tracing::debug!(handle, "gdrx_copier_create");
    Ok(handle)
}

/// Runs `copy` on a copier, without a lock, a system call or an allocation.
#[inline]
pub(crate) fn with<R>(handle: u64, copy: impl FnOnce(&ParallelCopier) -> Result<R, Failure>) -> Result<R, Failure> {
    let place = COPIERS.find(handle).ok_or_else(Failure::unknown_handle)?;
    let result = marks::marked(place.name(), || {
        let current = place.current.load(Ordering::Acquire);
        // SAFETY: null, or made by `create` from a box. `destroy` frees it only after it was taken out of `current` and then
        // no thread had a mark for this place. This thread's mark was set before the load above: either it is seen there,
        // or the load no longer saw the copier.
        let held = unsafe { current.as_ref() }?;
        (held.handle == handle).then(|| copy(&held.copier))
    });
    result.flatten().unwrap_or_else(|| Err(Failure::unknown_handle()))
}

/// Ends a copier and its threads.
pub(crate) fn destroy(handle: u64) -> Result<(), Failure> {
    let place = COPIERS.retire(handle)?;
    let current = place.current.swap(ptr::null_mut(), Ordering::AcqRel);
    let deadline = Instant::now() + PATIENCE;
    while !marks::unused(place.name()) {
        if Instant::now() >= deadline {
            // A copy was left by `longjmp`, so this thread may be inside still: its workers stay, and its place is used up.
            let text = "a copy through the copier does not end; its threads were left alone";
            return Err(Failure::new(libc::EBUSY, Kind::Busy, text));
        }
        thread::yield_now();
    }
    if !current.is_null() {
        // SAFETY: made by `create` from a box, taken out, and in nobody's use.
        drop(unsafe { Box::from_raw(current) });
    }
    COPIERS.recycle(handle);
    tracing::debug!(handle, "gdrx_copier_destroy");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn builder() -> ParallelCopierBuilder {
        marks::init();
        ParallelCopier::builder()
    }

    #[test]
    fn a_copier_is_found_until_it_is_destroyed() {
        let handle = create(&builder()).unwrap();
        assert!(with(handle, |copier| Ok(copier.threads())).unwrap() >= 1);
        destroy(handle).unwrap();
        let kind = |result: Result<(), Failure>| result.unwrap_err().kind();
        assert_eq!(kind(with(handle, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(destroy(handle)), Kind::InvalidHandle);
        assert_eq!(kind(with(0, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(create(&builder().threads(65)).map(drop)), Kind::InvalidArgument);
    }

    #[test]
    fn destroying_waits_for_a_copy_at_work() {
        let handle = create(&builder()).unwrap();
        let (inside, leave) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                with(handle, |_| {
                    inside.store(true, Ordering::SeqCst);
                    while !leave.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                    Ok(())
                })
                .unwrap();
            });
            while !inside.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let destroyer = scope.spawn(|| destroy(handle));
            thread::sleep(Duration::from_millis(20));
            assert!(!destroyer.is_finished());
            leave.store(true, Ordering::SeqCst);
            destroyer.join().unwrap().unwrap();
        });
    }
}
