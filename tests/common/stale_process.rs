//! Processes of the test: how they start, what they share, how they wait, and that none stays behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub(crate) const MAX_WORKERS: usize = 64;
pub(crate) const MAX_NEIGHBOURS: usize = 2;
pub(crate) const MAX_SCENARIOS: usize = 16;
pub(crate) const OUTCOMES: usize = 4;

/// No single step takes this long unless something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the processes of one round tell each other. All zeros is its first state.
pub(crate) struct Slot {
    pub(crate) child: AtomicI32,
    /// The child has made its first probes.
    pub(crate) ready: AtomicBool,
    /// The victim is in its copy loop.
    pub(crate) copying: AtomicBool,
    /// The victim has done all it will do.
    pub(crate) gone: AtomicBool,
    /// The child could read the window while its parent's lived.
    pub(crate) inherited: AtomicBool,
    /// The worst outcome of the round so far, as its index plus 1.
    pub(crate) worst: AtomicUsize,
}

impl Slot {
    pub(crate) fn reset(&self) {
        self.child.store(0, Ordering::Relaxed);
        self.worst.store(0, Ordering::Relaxed);
        for flag in [&self.ready, &self.copying, &self.gone, &self.inherited] {
            flag.store(false, Ordering::Release);
        }
    }
}

/// What every process of the test sees. All zeros is its first state.
pub(crate) struct Shared {
    /// Everybody leaves at once.
    pub(crate) abandon: AtomicBool,
    /// The rounds are done: neighbours and owner leave.
    pub(crate) finish: AtomicBool,
    pub(crate) next_round: AtomicU64,
    pub(crate) counts: [[AtomicU64; OUTCOMES]; MAX_SCENARIOS],
    /// Rounds on memory that nobody but the victim held.
    pub(crate) recycled: AtomicU64,
    pub(crate) neighbours: AtomicUsize,
    /// Windows that each neighbour has made and checked.
    pub(crate) turns: [AtomicU64; MAX_NEIGHBOURS],
    pub(crate) slots: [Slot; MAX_WORKERS],
    /// The first complaint, in a cell that is set once, by whoever comes first.
    complained: AtomicBool,
    complaint: [AtomicU64; 64],
}

impl Shared {
    /// Shared with all children to come, and never unmapped.
    pub(crate) fn new() -> &'static Self {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), size_of::<Self>(), rights, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "no memory to share");
        // SAFETY: mapped, aligned to a page, zeroed, which is a valid state of atomics, and never unmapped.
        unsafe { &*at.cast::<Self>() }
    }

    /// Keeps the first complaint.
    pub(crate) fn complain(&self, text: &str) {
        if self.complained.swap(true, Ordering::AcqRel) {
            return;
        }
        for (place, part) in self.complaint.iter().zip(text.as_bytes().chunks(8)) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            place.store(u64::from_ne_bytes(word), Ordering::Release);
        }
    }

    pub(crate) fn complaint(&self) -> Option<String> {
        let bytes: Vec<u8> =
            self.complaint.iter().flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes()).collect();
        let text = String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned();
        self.complained.load(Ordering::Acquire).then_some(text)
    }

    pub(crate) fn fail(&self, text: &str) {
        self.complain(text);
        self.abandon.store(true, Ordering::Release);
    }

    pub(crate) fn rounds_done(&self) -> u64 {
        self.counts.iter().flatten().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Waits until every BAR1 page and every piece of memory given up before may have got a new owner: until some
    /// neighbour has made one window that it began after this call did.
    pub(crate) fn neighbours_turn(&self) -> Result<(), String> {
        let turns = || self.turns.iter().map(|turns| turns.load(Ordering::Acquire)).sum::<u64>();
        // Each of n neighbours may be in the middle of one turn: n + 1 more cannot be had without a whole one.
        let enough = turns() + u64::try_from(self.neighbours.load(Ordering::Relaxed)).expect("a small number") + 1;
        self.wait("a neighbour's turn", || turns() >= enough)
    }

    /// Waits for another process of the round.
    pub(crate) fn wait(&self, what: &str, done: impl Fn() -> bool) -> Result<(), String> {
        let started = Instant::now();
        while !done() {
            if self.abandon.load(Ordering::Acquire) {
                return Err("the test was abandoned".to_owned());
            }
            if started.elapsed() > PATIENCE {
                return Err(format!("{what} did not come within {PATIENCE:?}"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// How a child is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fork {
    /// fork(3), with its handlers.
    Library,
    /// clone(2) by number, which no handler sees.
    Raw,
}

/// Runs `child` in a new process, which ends with it. An error there is the test's complaint.
///
/// The caller has no other thread that works: the child runs ordinary code.
pub(crate) fn spawn(shared: &Shared, how: Fork, child: impl FnOnce() -> Result<(), String>) -> Result<i32, String> {
    let pid = match how {
        // SAFETY: the child runs `child` and leaves by _exit, so that nothing of the parent's is dropped twice.
        Fork::Library => unsafe { libc::fork() },
        Fork::Raw => {
            // SAFETY: as above; without a stack or flags clone(2) is fork(2).
            let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            i32::try_from(pid).map_err(|error| error.to_string())?
        }
    };
    if pid < 0 {
        return Err(format!("fork: {}", std::io::Error::last_os_error()));
    }
    if pid > 0 {
        return Ok(pid);
    }
    let result = catch_unwind(AssertUnwindSafe(child)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without a text")))
    });
    if let Err(error) = &result {
        shared.fail(error);
    }
    // SAFETY: ends the child without exit handlers, which are the parent's.
    unsafe { libc::_exit(i32::from(result.is_err())) }
}

/// The calling process ends with its parent, which must be `parent`.
pub(crate) fn die_with(parent: i32) -> Result<(), String> {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if parent_pid() == parent { Ok(()) } else { Err("the parent ended".to_owned()) }
}

/// Orphans among the caller's descendants become its children.
pub(crate) fn adopt_orphans(adopt: bool) {
    // SAFETY: takes numbers only.
    let code = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(adopt)) };
    assert_eq!(code, 0, "PR_SET_CHILD_SUBREAPER");
}

pub(crate) fn pid() -> i32 {
    // SAFETY: no preconditions. The library's cached number would be the parent's after a raw clone.
    i32::try_from(unsafe { libc::syscall(libc::SYS_getpid) }).expect("a pid")
}

pub(crate) fn parent_pid() -> i32 {
    // SAFETY: no preconditions.
    unsafe { libc::getppid() }
}

pub(crate) fn kill(pid: i32) {
    // SAFETY: takes numbers only; `pid` is a child not yet waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// How a child ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    Code(i32),
    Signal(i32),
}

/// Waits for a child's end: `pid`, or any with -1. `None` with `flags` `WNOHANG` if there is none yet.
fn wait_pid(pid: i32, flags: i32) -> std::io::Result<Option<(i32, Ended)>> {
    loop {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        let pid = unsafe { libc::waitpid(pid, &mut status, flags) };
        if pid > 0 {
            let signalled = libc::WIFSIGNALED(status);
            let ended =
                if signalled { Ended::Signal(libc::WTERMSIG(status)) } else { Ended::Code(libc::WEXITSTATUS(status)) };
            return Ok(Some((pid, ended)));
        }
        if pid == 0 {
            return Ok(None);
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Waits for one child, which must end as said.
pub(crate) fn reap(pid: i32, wanted: Ended) -> Result<(), String> {
    match wait_pid(pid, 0) {
        Ok(Some((_, ended))) if ended == wanted => Ok(()),
        Ok(ended) => Err(format!("a process of the round ended with {ended:?} instead of {wanted:?}")),
        Err(error) => Err(format!("waitpid: {error}")),
    }
}

/// The long-running processes of a test, ended and reaped when dropped, orphans of theirs included.
pub(crate) struct Crew {
    shared: &'static Shared,
    members: Vec<(i32, &'static str)>,
}

impl Crew {
    pub(crate) fn new(shared: &'static Shared) -> Self {
        adopt_orphans(true);
        Self { shared, members: Vec::new() }
    }

    pub(crate) fn start(
        &mut self,
        name: &'static str,
        member: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        let parent = pid();
        let named = |error| format!("{name}: {error}");
        let child = spawn(self.shared, Fork::Library, || die_with(parent).and_then(|()| member()).map_err(named))?;
        self.members.push((child, name));
        Ok(())
    }

    /// Waits until no member of this name is left, or `deadline` has passed, or a member failed.
    pub(crate) fn join(&mut self, name: &str, deadline: Instant) -> Result<(), String> {
        while self.members.iter().any(|member| member.1 == name) {
            match wait_pid(-1, libc::WNOHANG).map_err(|error| format!("waitpid: {error}"))? {
                Some((pid, ended)) => {
                    let found = self.members.iter().position(|member| member.0 == pid);
                    // An adopted orphan is no member; who cares for it has told of its end, or could not.
                    let Some(index) = found else { continue };
                    let (_, name) = self.members.swap_remove(index);
                    if ended != Ended::Code(0) {
                        let said = self.shared.complaint().unwrap_or_default();
                        return Err(format!("the {name} ended with {ended:?}: {said}"));
                    }
                }
                None if Instant::now() > deadline => return Err(format!("time is up, waiting for a {name}")),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Ok(())
    }

    /// Whether neither child nor orphan nor zombie is left.
    pub(crate) fn nobody_left(&self) -> bool {
        wait_pid(-1, libc::WNOHANG).is_err_and(|error| error.raw_os_error() == Some(libc::ECHILD))
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.abandon.store(true, Ordering::Release);
        let grace = Instant::now() + Duration::from_secs(5);
        // Ends with ECHILD: no child, no orphan, no zombie.
        while let Ok(reaped) = wait_pid(-1, libc::WNOHANG) {
            match reaped {
                Some((pid, _)) => self.members.retain(|member| member.0 != pid),
                None => {
                    if Instant::now() > grace {
                        self.members.iter().for_each(|member| kill(member.0));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        adopt_orphans(false);
    }
}

/// Tests of one binary run on threads, but only one of them may fork and reap at a time.
pub(crate) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static GATE: OnceLock<std::sync::Mutex<()>> = OnceLock::new();
    GATE.get_or_init(Default::default).lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
