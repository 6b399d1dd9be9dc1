//! What handles other than pins stand for: objects with parts that any thread may use, and parts for one thread at a time.
//!
//! As with mappings, a call marks what it uses (see `marks`) and takes no lock; destroying takes the object out of sight and
//! waits for marks to go, which calls that race with it set, in error.
//!
//! A part for one thread at a time belongs to the thread that used it last. While it stays with that thread, a call finds out
//! by a load that it may go on. Another thread first takes the part over: it makes it nobody's, and then looks for marks of
//! calls that are at work, with the fence that `marks` make all threads pass. So handing a part on costs a system call, and
//! using it costs neither a locked instruction nor a fence, which would drain the write-combining buffers in every call.

#![allow(unsafe_code, reason = "objects are read through a pointer that marks keep alive")]

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{Failure, Kind};
use crate::marks;
use crate::part::{Leave, Part, name};
use crate::sessions::Open;
use crate::slab::Slab;

/// How long destroying waits for calls at work.
const PATIENCE: Duration = Duration::from_secs(1);

/// All objects of one kind: `S` for any number of threads, `A` and `B` for one thread at a time each.
pub(crate) struct Table<S: 'static, A: 'static = (), B: 'static = ()> {
    what: &'static str,
    slab: Slab<Place<S, A, B>>,
}

struct Place<S, A, B> {
    /// What calls use. It owns what it points to.
    current: AtomicPtr<Held<S, A, B>>,
    first: Part,
    second: Part,
}

impl<S, A, B> Default for Place<S, A, B> {
    fn default() -> Self {
        Self { current: AtomicPtr::default(), first: Part::default(), second: Part::default() }
    }
}

struct Held<S, A, B> {
    handle: u64,
    shared: S,
    first: UnsafeCell<A>,
    second: UnsafeCell<B>,
    /// Of which `gdr_close` ends it.
    open: Weak<Open>,
}

/// How an attempt ended.
enum Attempt<R> {
    Done(R),
    NotMine(u64),
    Busy,
    Gone,
}

impl<S: Send + Sync + 'static, A: Send + 'static, B: Send + 'static> Table<S, A, B> {
    /// `what` names one of them in messages.
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, slab: Slab::new() }
    }

    /// Puts an object in, to be destroyed with its session if it has one.
    pub(crate) fn create(
        &'static self,
        open: Option<&Arc<Open>>,
        shared: S,
        first: A,
        second: B,
        destroy: fn(u64) -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        marks::init();
        let (handle, place) = self.slab.claim().ok_or_else(|| {
            Failure::new(libc::EMFILE, Kind::OutOfMemory, format!("a million {}s are alive; destroy some", self.what))
        })?;
        place.first.reset();
        place.second.reset();
        let (first, second) = (UnsafeCell::new(first), UnsafeCell::new(second));
        let held = Held { handle, shared, first, second, open: open.map_or_else(Weak::new, Arc::downgrade) };
        place.current.store(Box::into_raw(Box::new(held)), Ordering::Release);
        if let Some(Err(closing)) = open.map(|open| open.add_object(self.what, handle, destroy)) {
            return destroy(handle).and(Err(closing));
        }
        tracing::debug!(handle, "{} created", self.what);
        Ok(handle)
    }

    /// Runs `call` on what any number of threads may use, without a lock, a system call or an allocation.
    #[inline]
    pub(crate) fn shared<R>(
        &'static self,
        handle: u64,
        call: impl FnOnce(&S) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let place = self.slab.find(handle).ok_or_else(|| self.unknown())?;
        let result = marks::marked(name(&place.current), || {
            let current = place.current.load(Ordering::Acquire);
            // SAFETY: null, or made by `create` from a box. `destroy` frees it only after it was taken out of `current` and
            // then no thread had a mark for this place. This thread's mark was set before the load above: either it is
            // seen there, or the load no longer saw the object.
            let held = unsafe { current.as_ref() }?;
            (held.handle == handle).then(|| call(&held.shared))
        });
        result.flatten().unwrap_or_else(|| Err(self.unknown()))
    }

    /// Runs `call` on the first part, in the process that made it only.
    #[inline]
    pub(crate) fn first<R>(
        &'static self,
        handle: u64,
        call: impl FnOnce(&mut A) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.alone(handle, |place| &place.first, |held| &held.first, call)
    }

    /// Runs `call` on the second part.
    #[inline]
    pub(crate) fn second<R>(
        &'static self,
        handle: u64,
        call: impl FnOnce(&mut B) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.alone(handle, |place| &place.second, |held| &held.second, call)
    }

    #[inline]
    fn alone<T, R>(
        &'static self,
        handle: u64,
        part: fn(&Place<S, A, B>) -> &Part,
        cell: fn(&Held<S, A, B>) -> &UnsafeCell<T>,
        call: impl FnOnce(&mut T) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let place = self.slab.find(handle).ok_or_else(|| self.unknown())?;
        let part = part(place);
        let mut call = Some(call);
        let mut attempt = || {
            marks::marked_by(name(part), |me| {
                if part.owner.load(Ordering::Acquire) != me {
                    return Attempt::NotMine(me);
                }
                if part.inside.load(Ordering::Relaxed) {
                    return Attempt::Busy;
                }
                part.inside.store(true, Ordering::Relaxed);
                let _leave = Leave(&part.inside);
                let current = place.current.load(Ordering::Acquire);
                // SAFETY: as in `shared`, for the mark of this part.
                let held = unsafe { current.as_ref() }.filter(|held| held.handle == handle);
                let (Some(held), Some(call)) = (held, call.take()) else { return Attempt::Gone };
                // SAFETY: this thread is the owner, and not in a call already. Whoever takes the part over first makes it
                // nobody's and then finds no mark: either this thread's mark was seen, or it did not find itself to be the
                // owner. So no other reference to the part's value exists.
                Attempt::Done(call(unsafe { &mut *cell(held).get() }))
            })
        };
        let mut outcome = attempt();
        if let Some(Attempt::NotMine(me)) = outcome {
            // In a child the marks of the parent's other threads are never cleared.
            self.slab.find_own(handle)?;
            if !part.take_over(me) {
                return Err(self.busy());
            }
            outcome = attempt();
        }
        match outcome {
            Some(Attempt::Done(result)) => result,
            Some(Attempt::Busy | Attempt::NotMine(_)) => Err(self.busy()),
            Some(Attempt::Gone) | None => Err(self.unknown()),
        }
    }

    /// Refuses a handle that was made by another process. It makes a system call.
    pub(crate) fn check_process(&self, handle: u64) -> Result<(), Failure> {
        self.slab.find_own(handle).map(drop)
    }

    #[cold]
    fn unknown(&self) -> Failure {
        let text = format!("the handle is of no live {}: it was never made, or was destroyed", self.what);
        Failure::new(libc::EINVAL, Kind::InvalidHandle, text)
    }

    #[cold]
    fn busy(&self) -> Failure {
        let text = format!("another thread is in a call on this {}; one at a time may be", self.what);
        Failure::new(libc::EBUSY, Kind::Busy, text)
    }

    /// Takes an object out and gives it to `end`, once no call is at work on it; `hurry` is to bring these to an end. If
    /// they do not end, the object stays as it was.
    pub(crate) fn destroy(
        &'static self,
        handle: u64,
        hurry: impl FnOnce(&S),
        end: impl FnOnce(S, A, B) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let place = self.slab.retire(handle)?;
        let current = place.current.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: null, or made by `create` from a box; only its taker, this thread, frees it, further down.
        if let Some(held) = unsafe { current.as_ref() } {
            hurry(&held.shared);
        }
        let deadline = Instant::now() + PATIENCE;
        let names = [name(&place.current), name(&place.first), name(&place.second)];
        while !names.into_iter().all(marks::unused) {
            if Instant::now() >= deadline {
                place.current.store(current, Ordering::Release);
                self.slab.restore(handle);
                let text = format!("a call on this {} does not end; end it, then destroy again", self.what);
                return Err(Failure::new(libc::EBUSY, Kind::Busy, text));
            }
            thread::yield_now();
        }
        if current.is_null() {
            return Err(self.unknown());
        }
        // SAFETY: made by `create` from a box, taken out, and in nobody's use.
        let held = unsafe { Box::from_raw(current) };
        self.slab.recycle(handle);
        if let Some(open) = held.open.upgrade() {
            open.remove_object(self.what, handle);
        }
        tracing::debug!(handle, "{} taken out", self.what);
        let Held { shared, first, second, .. } = *held;
        end(shared, first.into_inner(), second.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;

    use super::*;

    static TABLE: Table<AtomicUsize, Vec<u64>, u64> = Table::new("thing");

    fn create() -> u64 {
        TABLE.create(None, AtomicUsize::new(0), Vec::new(), 7, destroy).unwrap()
    }

    fn destroy(handle: u64) -> Result<(), Failure> {
        TABLE.destroy(handle, |shared| shared.store(99, Ordering::SeqCst), |_, _, _| Ok(()))
    }

    fn push(handle: u64, number: u64) {
        let push = |first: &mut Vec<u64>| {
            first.push(number);
            Ok(())
        };
        TABLE.first(handle, push).unwrap();
    }

    fn kind<R: std::fmt::Debug>(result: Result<R, Failure>) -> Kind {
        result.unwrap_err().kind()
    }

    #[test]
    fn an_object_is_found_until_it_is_destroyed() {
        let handle = create();
        push(handle, 1);
        assert_eq!(TABLE.second(handle, |second| Ok(*second)).unwrap(), 7);
        assert_eq!(TABLE.shared(handle, |shared| Ok(shared.load(Ordering::SeqCst))).unwrap(), 0);
        destroy(handle).unwrap();
        assert_eq!(kind(TABLE.first(handle, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(TABLE.shared(handle, |_| Ok(()))), Kind::InvalidHandle);
        assert_eq!(kind(destroy(handle)), Kind::InvalidHandle);
        assert_eq!(kind(TABLE.second(0, |_| Ok(()))), Kind::InvalidHandle);
    }

    #[test]
    fn a_part_follows_its_users() {
        let handle = create();
        for round in 0..50 {
            // Joined, so that one call is made after the other.
            thread::spawn(move || push(handle, round)).join().unwrap();
            push(handle, round);
        }
        assert_eq!(TABLE.first(handle, |first| Ok(first.len())).unwrap(), 100);
        destroy(handle).unwrap();
    }

    #[test]
    fn two_at_once_are_refused_and_parts_are_independent() {
        let handle = create();
        TABLE
            .first(handle, |_| {
                assert_eq!(kind(TABLE.first(handle, |_| Ok(()))), Kind::Busy, "from the same thread");
                thread::scope(|scope| {
                    scope.spawn(|| {
                        assert_eq!(kind(TABLE.first(handle, |_| Ok(()))), Kind::Busy);
                        assert_eq!(TABLE.second(handle, |second| Ok(std::mem::replace(second, 8))).unwrap(), 7);
                    });
                });
                assert_eq!(TABLE.second(handle, |second| Ok(*second)).unwrap(), 8);
                Ok(())
            })
            .unwrap();
        // The refused thread has left nothing behind.
        TABLE.first(handle, |_| Ok(())).unwrap();
        destroy(handle).unwrap();
    }

    #[test]
    fn threads_that_race_never_meet_inside() {
        let handle = create();
        let (inside, calls) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let start = Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..20_000 {
                        let called = TABLE.first(handle, |first| {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            first.push(1);
                            calls.fetch_add(1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                            Ok(())
                        });
                        assert!(called.is_ok() || kind(called) == Kind::Busy);
                    }
                });
            }
        });
        let calls = calls.load(Ordering::SeqCst);
        assert!(calls > 0);
        assert_eq!(TABLE.first(handle, |first| Ok(first.len())).unwrap(), calls);
        destroy(handle).unwrap();
    }

    #[test]
    fn destroying_hurries_and_waits_for_a_call_at_work() {
        let handle = create();
        let (entered, is_inside) = channel();
        thread::scope(|scope| {
            let caller = scope.spawn(move || {
                TABLE.second(handle, |_| {
                    entered.send(()).unwrap();
                    // Ends when it is told to.
                    while TABLE.shared(handle, |shared| Ok(shared.load(Ordering::SeqCst))).unwrap_or(99) != 99 {
                        thread::yield_now();
                    }
                    Ok(())
                })
            });
            is_inside.recv().unwrap();
            destroy(handle).unwrap();
            caller.join().unwrap().unwrap();
        });
    }

    #[test]
    fn what_cannot_be_destroyed_stays() {
        let handle = create();
        let (entered, is_inside) = channel();
        let (leave, may_leave) = channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                TABLE
                    .first(handle, |first| {
                        entered.send(()).unwrap();
                        may_leave.recv().unwrap();
                        first.push(1);
                        Ok(())
                    })
                    .unwrap();
            });
            is_inside.recv().unwrap();
            assert_eq!(kind(destroy(handle)), Kind::Busy);
            assert_eq!(TABLE.second(handle, |second| Ok(*second)).unwrap(), 7);
            leave.send(()).unwrap();
        });
        assert_eq!(TABLE.first(handle, |first| Ok(first.len())).unwrap(), 1);
        destroy(handle).unwrap();
    }

    #[test]
    fn a_panic_leaves_the_part_usable() {
        let handle = create();
        let panicked = std::panic::catch_unwind(|| TABLE.first(handle, |_| -> Result<(), Failure> { panic!("a bug") }));
        assert!(panicked.is_err());
        TABLE.first(handle, |_| Ok(())).unwrap();
        destroy(handle).unwrap();
    }
}
