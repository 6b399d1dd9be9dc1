//! A forked child that is run one instruction at a time.

#![allow(unsafe_code, reason = "fork and ptrace")]

use std::arch::asm;
use std::cell::Cell;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// The child's exit status after a panic; no `errno` is as large.
const PANICKED: i32 = 255;

/// A traced child, killed when dropped so that a failing test leaves none behind.
pub struct Tracee {
    pid: libc::pid_t,
    has_exited: Cell<bool>,
}

/// Stops a child at this place, for [`Tracee::resume`] and [`Tracee::step`] to go on from.
#[inline(always)]
pub fn breakpoint() {
    // SAFETY: stops this process for its tracer, changes nothing.
    unsafe { asm!("int3") };
}

impl Tracee {
    /// Runs `child` in a forked process up to its first [`breakpoint`]. `None`, and a line that says so, where tracing is
    /// not permitted.
    pub fn start(what: &str, child: impl FnOnce()) -> Option<Self> {
        // SAFETY: the child leaves by `_exit` below, so that nothing of the parent's is torn down twice.
        let pid = unsafe { libc::fork() };
        assert_ne!(pid, -1, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: asks to be traced by the parent; the other arguments are ignored.
            let status = if unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } != 0 {
                std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM)
            } else if catch_unwind(AssertUnwindSafe(child)).is_err() {
                PANICKED
            } else {
                0
            };
            // SAFETY: ends this process without running what belongs to the parent.
            unsafe { libc::_exit(status) }
        }
        let tracee = Self { pid, has_exited: Cell::new(false) };
        match tracee.wait(&"up to the first breakpoint") {
            None => Some(tracee),
            Some(status @ (0 | PANICKED)) => panic!("{what}: the child ended with status {status} before a breakpoint"),
            Some(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                eprintln!("SKIP: {what} is NOT proven here: ptrace is not permitted: {error}");
                None
            }
        }
    }

    /// Executes one instruction.
    pub fn step(&self, doing: &dyn Debug) {
        assert_eq!(self.go_on(libc::PTRACE_SINGLESTEP, doing), None, "{doing:?}: the child has exited");
    }

    /// Runs up to the next breakpoint; false if the child has exited instead.
    pub fn resume(&self, doing: &dyn Debug) -> bool {
        let exited = self.go_on(libc::PTRACE_CONT, doing);
        assert!(matches!(exited, None | Some(0)), "{doing:?}: the child ended with status {exited:?}");
        exited.is_none()
    }

    /// The first bytes of the instruction that comes next.
    pub fn next_instruction(&self) -> [u8; 8] {
        // SAFETY: a value of plain integers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        // SAFETY: the child is ours and stopped; the structure is the one that the request fills.
        let rc = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.pid, 0, &raw mut registers) };
        assert_eq!(rc, 0, "ptrace: {}", std::io::Error::last_os_error());
        let mut bytes = [0; 8];
        self.read(usize::try_from(registers.rip).expect("an address"), &mut bytes);
        bytes
    }

    /// Reads the child's memory.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let here = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
        let there = libc::iovec { iov_base: ptr::without_provenance_mut(at), iov_len: to.len() };
        // SAFETY: writes to `to` alone; the kernel checks the child's side.
        let copied = unsafe { libc::process_vm_readv(self.pid, &raw const here, 1, &raw const there, 1, 0) };
        assert_eq!(usize::try_from(copied), Ok(to.len()), "process_vm_readv: {}", std::io::Error::last_os_error());
    }

    /// Writes the child's memory, which the child may write itself.
    pub fn write(&self, at: usize, from: &[u8]) {
        let here = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        let there = libc::iovec { iov_base: ptr::without_provenance_mut(at), iov_len: from.len() };
        // SAFETY: reads `from` alone; the kernel checks the child's side.
        let copied = unsafe { libc::process_vm_writev(self.pid, &raw const here, 1, &raw const there, 1, 0) };
        assert_eq!(usize::try_from(copied), Ok(from.len()), "process_vm_writev: {}", std::io::Error::last_os_error());
    }

    /// Lets the child go on by `request` until its next stop, which has to be a trap.
    fn go_on(&self, request: libc::c_uint, doing: &dyn Debug) -> Option<i32> {
        // SAFETY: the child is ours and stopped; no signal is delivered.
        let rc = unsafe { libc::ptrace(request, self.pid, 0, 0) };
        assert_eq!(rc, 0, "ptrace: {}", std::io::Error::last_os_error());
        self.wait(doing)
    }

    /// The exit status, if the child has exited.
    fn wait(&self, doing: &dyn Debug) -> Option<i32> {
        let mut status = 0;
        // SAFETY: waits for our own child.
        let pid = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(pid, self.pid, "waitpid: {}", std::io::Error::last_os_error());
        if libc::WIFEXITED(status) {
            self.has_exited.set(true);
            return Some(libc::WEXITSTATUS(status));
        }
        assert!(
            libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTRAP,
            "{doing:?}: wait status {status:#x}"
        );
        None
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if self.has_exited.get() {
            return;
        }
        // SAFETY: our own child, which has not been reaped, so the number is still its own.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: reaps it.
        unsafe { libc::waitpid(self.pid, ptr::null_mut(), 0) };
    }
}
