//! Threads that may not make system calls.

#![allow(unsafe_code, reason = "a system-call filter and the handler of its signal")]

use std::cell::Cell;
use std::ffi::{c_int, c_long, c_void};
use std::hint::black_box;
use std::mem::{offset_of, zeroed};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libc::{seccomp_data, siginfo_t, sock_filter, sock_fprog, ucontext_t};

const PATIENCE: Duration = Duration::from_secs(60);

/// `AUDIT_ARCH_X86_64` of linux/audit.h: `EM_X86_64`, 64-bit, little-endian.
const X86_64: u32 = 62 | 0x8000_0000 | 0x4000_0000;

/// System calls that were tried and not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trapped {
    pub calls: usize,
    /// The number of the last one.
    pub last: Option<i64>,
}

thread_local! {
    static TRAPPED: Cell<Trapped> = const { Cell::new(Trapped { calls: 0, last: None }) };
}

/// System calls of this thread that were trapped so far.
pub fn calls_trapped() -> usize {
    TRAPPED.get().calls
}

/// Notes the call and lets it fail with ENOSYS.
extern "C" fn on_trap(_signal: c_int, _info: *mut siginfo_t, context: *mut c_void) {
    const RAX: usize = 13;
    const _: () = assert!(libc::REG_RAX == 13);
    // SAFETY: with SA_SIGINFO the third argument is the interrupted context, which nothing else refers to.
    let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    // The kernel restores the number of a trapped call here (seccomp(2), SECCOMP_RET_TRAP).
    let number = std::mem::replace(&mut registers[RAX], -i64::from(libc::ENOSYS));
    TRAPPED.set(Trapped { calls: TRAPPED.get().calls + 1, last: Some(number) });
}

fn handle_traps() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all zeroes are a valid value of this struct of integers, whose rest is filled in here.
        let mut action: libc::sigaction = unsafe { zeroed() };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_trap;
        // SAFETY: a function pointer and an address have the same size and representation.
        action.sa_sigaction = unsafe { std::mem::transmute_copy(&handler) };
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler does nothing but what is allowed in one.
        let set = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
        assert_eq!(set, 0, "sigaction: {}", std::io::Error::last_os_error());
    });
}

fn number(call: c_long) -> u32 {
    u32::try_from(call).expect("system calls have small numbers")
}

fn code(parts: u32) -> u16 {
    u16::try_from(parts).expect("operation codes have 16 bits")
}

/// From here on every system call of this thread traps, but for its end and the end of the trap's handler.
fn install() {
    let at = |offset: usize| u32::try_from(offset).expect("a small struct");
    let load = |k| sock_filter { code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), jt: 0, jf: 0, k };
    let equal = |k, jt, jf| sock_filter { code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K), jt, jf, k };
    let answer = |k| sock_filter { code: code(libc::BPF_RET | libc::BPF_K), jt: 0, jf: 0, k };
    let mut program = [
        load(at(offset_of!(seccomp_data, arch))),
        equal(X86_64, 0, 3),
        load(at(offset_of!(seccomp_data, nr))),
        equal(number(libc::SYS_rt_sigreturn), 2, 0),
        equal(number(libc::SYS_exit), 1, 0),
        answer(libc::SECCOMP_RET_TRAP),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let length = u16::try_from(program.len()).expect("a short program");
    let program = sock_fprog { len: length, filter: program.as_mut_ptr() };
    // SAFETY: plain values; from here on this thread gains no privileges by exec, which it never calls.
    let set = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(set, 0, "PR_SET_NO_NEW_PRIVS: {}", std::io::Error::last_os_error());
    // SAFETY: the program outlives the call, which copies it.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    assert_eq!(set, 0, "seccomp: {}", std::io::Error::last_os_error());
}

/// Runs `work` on a thread of its own, on which every system call fails and is counted.
///
/// The thread ends without unwinding past `work`, because even the usual end of a thread is a handful of system calls.
pub fn without_system_calls<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> (T, Trapped) {
    struct Slot<T> {
        is_done: AtomicBool,
        found: Mutex<Option<(thread::Result<T>, Trapped)>>,
    }

    handle_traps();
    let slot = Arc::new(Slot { is_done: AtomicBool::new(false), found: Mutex::new(None) });
    let theirs = Arc::clone(&slot);
    thread::spawn(move || {
        // Room in this thread's heap, should `work` panic.
        drop(black_box(vec![0_u8; 1 << 16]));
        let result = catch_unwind(AssertUnwindSafe(|| {
            install();
            work()
        }));
        // Nobody waits for this lock, so that it takes no system call.
        *theirs.found.lock().unwrap_or_else(PoisonError::into_inner) = Some((result, TRAPPED.get()));
        theirs.is_done.store(true, Ordering::Release);
        // SAFETY: ends this thread alone; what it owned is leaked.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    });
    let started = Instant::now();
    while !slot.is_done.load(Ordering::Acquire) {
        assert!(started.elapsed() < PATIENCE, "the thread without system calls does not end");
        thread::sleep(Duration::from_micros(200));
    }
    let found = slot.found.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (result, trapped) = found.expect("stored before `is_done`");
    (result.unwrap_or_else(|panic| resume_unwind(panic)), trapped)
}
