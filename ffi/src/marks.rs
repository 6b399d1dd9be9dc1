//! Which windows, and objects behind other handles, each thread is using at the moment, at the cost of plain stores.
//!
//! A copy marks the window it uses, and only then looks for the mapping; unmap takes the mapping out of sight, and only then
//! looks for marks. Each side stores and then loads, and the two must not pass each other. The usual way, a locked
//! instruction or a full fence in every copy, is the one thing that a copy must not do: it drains the write-combining
//! buffers (Intel SDM volume 3A, "Write combining"), so that no write would ever be posted. Instead the side that is rare
//! pays for both: `membarrier(2)` makes every thread of the process pass a full fence before unmap looks for marks. Where
//! the kernel lacks it, copies fence.
//!
//! The fence on every processor has a second effect that unmapping relies on: what threads stored through the mapping has
//! left their write-combining buffers.

#![allow(unsafe_code, reason = "two system calls")]

use std::ffi::{c_int, c_long};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence, fence};

use crate::slab::Slab;

// <linux/membarrier.h>.
const PRIVATE_EXPEDITED: c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

/// Marks of one thread at a time: one for each copy, two for one that goes through a parallel copier; the second copy and
/// further ones are those of signal handlers. As many as fill the line.
const DEPTH: usize = 7;

/// The windows in use by one thread, in a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Marks {
    /// 0 for none.
    windows: [AtomicUsize; DEPTH],
    /// How many are in use. Read and written by the owner alone.
    depth: AtomicUsize,
}

static MARKS: Slab<Marks> = Slab::new();

/// Whether `pass_all` acts for all threads, so that `pass` need not.
static EXPEDITED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: c_int) -> bool {
    let flags: c_int = 0;
    // SAFETY: the call takes numbers only and has no effect on memory.
    let result: c_long = unsafe { libc::syscall(libc::SYS_membarrier, command, flags, 0) };
    result == 0
}

/// Chooses the way for this process, once and before there is a window to copy through: the sides must agree.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let works = membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        EXPEDITED.store(works, Ordering::SeqCst);
    });
}

/// The copy's side: what was stored before is seen before what is loaded after, by whoever calls `pass_all`.
#[inline]
fn pass() {
    if EXPEDITED.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The other side. False if it could not be done, and nothing may be concluded.
#[must_use]
fn pass_all() -> bool {
    fence(Ordering::SeqCst);
    // A forked child has to register again on some kernels.
    !EXPEDITED.load(Ordering::Relaxed)
        || membarrier(PRIVATE_EXPEDITED)
        || (membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED))
}

/// A thread's place among the marks.
struct Mine {
    handle: u64,
    /// `None` where a million threads have marks.
    marks: Option<&'static Marks>,
}

impl Mine {
    fn new() -> Self {
        let (handle, marks) = MARKS.claim().unzip();
        Self { handle: handle.unwrap_or(0), marks }
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        let Some(marks) = self.marks else { return };
        for window in &marks.windows {
            window.store(0, Ordering::Release);
        }
        marks.depth.store(0, Ordering::Relaxed);
        // In a forked child the place stays taken.
        if MARKS.retire(self.handle).is_ok() {
            MARKS.recycle(self.handle);
        }
    }
}

/// Set until dropped.
struct Mark {
    marks: &'static Marks,
    depth: usize,
}

impl Mark {
    #[inline]
    fn set(marks: &'static Marks, window: usize) -> Self {
        let depth = marks.depth.load(Ordering::Relaxed);
        marks.depth.store(depth + 1, Ordering::Relaxed);
        let mark = Self { marks, depth };
        mark.place().store(window, Ordering::Relaxed);
        pass();
        mark
    }

    fn place(&self) -> &AtomicUsize {
        // Deeper than that there are only places left behind by a `longjmp` out of a copy.
        &self.marks.windows[self.depth.min(DEPTH - 1)]
    }
}

impl Drop for Mark {
    #[inline]
    fn drop(&mut self) {
        self.place().store(0, Ordering::Release);
        self.marks.depth.store(self.depth, Ordering::Relaxed);
        pass();
    }
}

thread_local! {
    static MINE: Mine = Mine::new();
}

/// Runs `copy` while this thread's mark for `window` is set; `None` if there is no room for a mark.
#[inline]
pub(crate) fn marked<R>(window: usize, copy: impl FnOnce() -> R) -> Option<R> {
    marked_by(window, |_| copy())
}

/// As `marked`; `copy` learns who this thread is: a number other than 0 that no other living thread has.
#[inline]
pub(crate) fn marked_by<R>(window: usize, copy: impl FnOnce(u64) -> R) -> Option<R> {
    match MINE.try_with(|mine| (mine.handle, mine.marks)) {
        Ok((me, marks)) => {
            let _mark = Mark::set(marks?, window);
            Some(copy(me))
        }
        // This thread is ending and has given its place up.
        Err(_) => {
            let mine = Mine::new();
            let _mark = Mark::set(mine.marks?, window);
            Some(copy(kernels_number()))
        }
    }
}

/// Who this thread is where it has no place: the kernel's number for it, set apart from handles.
#[cold]
fn kernels_number() -> u64 {
    // SAFETY: the call takes nothing and cannot fail.
    let number = unsafe { libc::gettid() };
    1 << 63 | u64::try_from(number).unwrap_or(0)
}

/// Whether no thread copies through `window`. To be asked once its mapping is out of sight.
pub(crate) fn unused(window: usize) -> bool {
    pass_all() && MARKS.values().all(|marks| marks.windows.iter().all(|mark| mark.load(Ordering::Acquire) != window))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn marks_are_seen_from_other_threads_and_nest() {
        init();
        let (inside, is_inside) = channel();
        let (leave, may_leave) = channel::<()>();
        let copier = thread::spawn(move || {
            marked(71, || {
                marked(72, || ()).unwrap();
                inside.send(()).unwrap();
                may_leave.recv().unwrap();
            })
        });
        is_inside.recv().unwrap();
        assert!(!unused(71) && unused(72) && unused(73));
        leave.send(()).unwrap();
        copier.join().unwrap().unwrap();
        assert!(unused(71));
    }

    #[test]
    fn a_panic_takes_its_mark_along() {
        init();
        let _ = std::panic::catch_unwind(|| marked(81, || panic!("in a copy")));
        assert!(unused(81));
    }

    #[test]
    fn places_left_behind_do_not_use_up_the_thread() {
        init();
        thread::spawn(|| {
            for _ in 0..2 * DEPTH {
                // What a longjmp does.
                MINE.with(|mine| std::mem::forget(Mark::set(mine.marks.unwrap(), 91)));
            }
            assert!(!unused(91));
            assert_eq!(marked(92, || unused(92)), Some(false));
            assert!(unused(92));
        })
        .join()
        .unwrap();
        assert!(unused(91), "gone with the thread");
    }
}
