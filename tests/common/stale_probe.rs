//! One load from an address that may have nothing behind it.
//!
//! `process_vm_readv` is no help: it refuses device mappings that a plain load can read. So the load is an instruction
//! at a known address, and the handler of SIGSEGV and SIGBUS steps over that one and over no other.

use std::arch::global_asm;
use std::ffi::c_void;

global_asm!(
    ".text",
    "gdrcopy_stale_load:",
    "xor eax, eax",
    "gdrcopy_stale_load_at:",
    "mov rdx, qword ptr [rdi]",
    "mov qword ptr [rsi], rdx",
    "gdrcopy_stale_load_end:",
    "ret",
    ".globl gdrcopy_stale_load",
    ".globl gdrcopy_stale_load_at",
    ".globl gdrcopy_stale_load_end",
);

unsafe extern "C" {
    /// Returns 0 and fills `to`, or what the handler put into EAX.
    fn gdrcopy_stale_load(from: *const u64, to: *mut u64) -> u32;
    static gdrcopy_stale_load_at: u8;
    static gdrcopy_stale_load_end: u8;
}

/// `SEGV_MAPERR` of sigaction(2): no mapping at that address.
const NO_MAPPING: i32 = 1;

/// EAX after a load that failed.
const UNMAPPED: i64 = 1;
const REFUSED: i64 = 2;

/// What one load met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Load {
    /// SIGSEGV, and no mapping there.
    Unmapped,
    /// A mapping, but no access: SIGBUS, or SIGSEGV for want of rights.
    Refused,
    Word(u64),
}

fn label(of: *const u8) -> i64 {
    i64::try_from(of.addr()).expect("user addresses have 47 bits")
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: with SA_SIGINFO the kernel passes the interrupted state, which nobody else refers to.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let (ip, ax) = (libc::REG_RIP.unsigned_abs(), libc::REG_RAX.unsigned_abs());
    let [ip, ax] = [ip, ax].map(|index| usize::try_from(index).expect("a small index"));
    if registers[ip] != label(&raw const gdrcopy_stale_load_at) {
        // Somebody else's fault: on return the instruction runs again and ends the process.
        // SAFETY: the default action is a valid one.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: with SA_SIGINFO the kernel passes a filled structure.
    let code = unsafe { (*info).si_code };
    registers[ip] = label(&raw const gdrcopy_stale_load_end);
    registers[ax] = if signal == libc::SIGSEGV && code == NO_MAPPING { UNMAPPED } else { REFUSED };
}

/// Installs the handler in this process and its children to come.
pub(crate) fn install() {
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = on_fault;
    #[allow(clippy::as_conversions, reason = "sigaction(2) wants the handler's address as a number")]
    let address = handler as usize;
    (action.sa_sigaction, action.sa_flags) = (address, libc::SA_SIGINFO);
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the handler touches registers of the interrupted load only.
        let code = unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
        assert_eq!(code, 0, "sigaction");
    }
}

/// Loads the 8 bytes at `addr`, which is a multiple of 8. Needs `install`.
pub(crate) fn load(addr: usize) -> Load {
    let mut word = 0;
    // SAFETY: the callee only loads from `addr`, and a fault of that load is stepped over.
    let code = unsafe { gdrcopy_stale_load(std::ptr::with_exposed_provenance(addr), &mut word) };
    match i64::from(code) {
        0 => Load::Word(word),
        UNMAPPED => Load::Unmapped,
        _ => Load::Refused,
    }
}

/// Whether the probe tells apart what there is to tell apart. Needs `install`.
pub(crate) fn prove() -> Result<(), String> {
    let page = 4096;
    let expect = |what: &str, found: Load, wanted: Load| {
        if found == wanted { Ok(()) } else { Err(format!("probe of {what}: {found:?} instead of {wanted:?}")) }
    };
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
    let at = unsafe {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), page, rights, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    let word: *mut u64 = at.cast();
    // SAFETY: the page was just mapped read-write.
    unsafe { word.write(0x1234_5678_9abc_def0) };
    let addr = at.expose_provenance();
    expect("a mapped page", load(addr), Load::Word(0x1234_5678_9abc_def0))?;
    // SAFETY: the page is this function's alone.
    unsafe { libc::mprotect(at, page, libc::PROT_NONE) };
    expect("a page without rights", load(addr), Load::Refused)?;
    // SAFETY: the page is this function's alone.
    unsafe { libc::mprotect(at, page, libc::PROT_READ) };
    expect("the page once more", load(addr), Load::Word(0x1234_5678_9abc_def0))?;
    // SAFETY: the name is a C string; the descriptor is closed below.
    let empty = unsafe { libc::memfd_create(c"empty".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: replaces only this function's page.
    unsafe { libc::mmap(at, page, libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED, empty, 0) };
    expect("a page past the end of its file", load(addr), Load::Refused)?;
    // SAFETY: the descriptor is this function's own.
    unsafe { libc::close(empty) };
    // SAFETY: the page is this function's alone.
    unsafe { libc::munmap(at, page) };
    expect("an unmapped page", load(addr), Load::Unmapped)?;
    expect("a null pointer", load(0), Load::Unmapped)
}
