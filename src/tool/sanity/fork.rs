//! Forked children, and memory that may not be there. The test binaries use this file, too.

#![allow(unsafe_code, reason = "fork, and system calls on addresses that may be invalid")]

use std::any::Any;
use std::fs::File;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::unistd::pipe;

/// A child that hangs is killed after this many seconds.
const PATIENCE: u32 = 30;

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By itself.
    Well,
    /// By a panic with this message.
    Panicked(String),
    /// By this signal.
    Killed(i32),
}

/// A forked child at work.
#[derive(Debug)]
pub(crate) struct Child {
    pid: libc::pid_t,
    words: File,
}

/// Starts `work` in a forked child. Nothing of the parent's is dropped there but what `work` itself drops.
pub(crate) fn start(work: impl FnOnce()) -> Child {
    let (from_child, to_parent) = pipe().expect("a pipe");
    // SAFETY: the child leaves by `_exit` below, so that nothing of the parent's is torn down twice.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        no_core();
        // SAFETY: the default action of SIGALRM ends the child.
        unsafe { libc::alarm(PATIENCE) };
        let ended = catch_unwind(AssertUnwindSafe(work));
        if let Err(panic) = ended {
            let _ = File::from(to_parent).write_all(words(&*panic).as_bytes());
        }
        // SAFETY: ends the child without running exit handlers or destructors.
        unsafe { libc::_exit(0) };
    }
    assert!(pid > 0, "fork: {}", std::io::Error::last_os_error());
    Child { pid, words: File::from(from_child) }
}

impl Child {
    /// Kills the child, unless it has ended by itself.
    pub(crate) fn kill(&self) {
        // SAFETY: our own child, which nobody has waited for.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// Waits for its end.
    pub(crate) fn ended(mut self) -> Ended {
        let mut message = String::new();
        self.words.read_to_string(&mut message).expect("the child's words");
        let mut status = 0;
        // SAFETY: waits for our own child.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(waited, self.pid, "waitpid: {}", std::io::Error::last_os_error());
        match (libc::WIFSIGNALED(status), message.is_empty()) {
            (true, _) => Ended::Killed(libc::WTERMSIG(status)),
            (false, true) => Ended::Well,
            (false, false) => Ended::Panicked(message),
        }
    }
}

/// A process that is expected to die leaves no core file.
pub(crate) fn no_core() {
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain values.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
}

/// Runs `work` in a forked child to its end.
pub(crate) fn fork(work: impl FnOnce()) -> Ended {
    start(work).ended()
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

/// Whether the byte can be loaded: the kernel tries it, and answers EFAULT where the process itself would fault.
pub(crate) fn is_readable(at: *const u8) -> bool {
    let (_read, write) = pipe().expect("a pipe");
    // SAFETY: the kernel copies one byte from this address or refuses.
    let copied = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&write), at.cast(), 1) };
    accessed(copied)
}

/// Whether the byte can be stored, as [`is_readable`]; it is overwritten with `byte` if so.
pub(crate) fn is_writable(at: *mut u8, byte: u8) -> bool {
    let (read, write) = pipe().expect("a pipe");
    File::from(write).write_all(&[byte]).expect("room for a byte");
    // SAFETY: the kernel copies one byte to this address, which the caller gives up, or refuses.
    let copied = unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&read), at.cast(), 1) };
    accessed(copied)
}

/// Loads a byte as a program does, whatever comes of it.
pub(crate) fn load(at: *const u8) -> u8 {
    // SAFETY: for addresses that fault: this process is there to die of it, or the memory is there after all.
    unsafe { at.read_volatile() }
}

fn accessed(copied: isize) -> bool {
    let error = std::io::Error::last_os_error();
    assert!(copied == 1 || error.raw_os_error() == Some(libc::EFAULT), "{error}");
    copied == 1
}
