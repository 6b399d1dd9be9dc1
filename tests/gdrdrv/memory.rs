//! Memory that the module does not pin, and where pinned memory is.

#![allow(unsafe_code, reason = "calls into the stand-in libcuda for memory that the library itself never allocates")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::fs;

use gdrcopy::{Allocator, BackendKind, DeviceRange, ErrorKind, MemoryKind, Session};

use crate::again::{NEWEST, OLDEST, inside, run, scratch, this_test};
use crate::common::standin::{FAULT, FREE, GPUS, MEMORY, MODULES, VA};

fn open() -> Session {
    Session::builder().backend(BackendKind::Gdrdrv).open().unwrap()
}

fn range(addr: u64, bytes: usize) -> DeviceRange<'static> {
    // SAFETY: either never mapped, or freed after its mapping is gone.
    unsafe { DeviceRange::from_raw(addr, bytes).unwrap() }
}

/// A function of the CUDA driver, which is preloaded.
fn driver(name: &CStr) -> *mut c_void {
    // SAFETY: a NUL-terminated name.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

/// A page in the current context from `cuMemAllocManaged`, with flags, or `cuMemAllocAsync`, on a stream: both zero.
fn allocate(name: &CStr) -> u64 {
    type Allocate = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> c_int;
    // SAFETY: the callers name functions that can be called so.
    let call = unsafe { std::mem::transmute::<*mut c_void, Allocate>(driver(name)) };
    let mut addr = 0;
    // SAFETY: the place outlives the call.
    assert_eq!(unsafe { call(&raw mut addr, 4096, std::ptr::null_mut()) }, 0, "{name:?}");
    addr
}

/// A page of host memory in the current context.
fn page_locked() -> u64 {
    type Allocate = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int;
    // SAFETY: the function's documented type.
    let call = unsafe { std::mem::transmute::<*mut c_void, Allocate>(driver(c"cuMemHostAlloc")) };
    let mut place = std::ptr::null_mut();
    // SAFETY: the place outlives the call.
    assert_eq!(unsafe { call(&raw mut place, 4096, 1) }, 0);
    u64::try_from(place.addr()).unwrap()
}

#[test]
fn what_cannot_be_pinned_is_refused_by_name() {
    if inside() {
        let session = open();
        let buffer = session.alloc(4096).unwrap();
        buffer.make_current().unwrap();
        let says = |addr: u64, kind: MemoryKind, words: &[&str]| {
            let error = session.pin(range(addr, 64)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(kind), "{error}");
            for word in words {
                assert!(error.to_string().contains(word), "no '{word}' in: {error}");
            }
        };
        says(allocate(c"cuMemAllocManaged"), MemoryKind::Managed, &["managed memory", "Session::alloc"]);
        says(page_locked(), MemoryKind::Host, &["host memory"]);
        // CUDA does not say whether a pool's memory is made for RDMA; the module's answer does.
        let pool = allocate(c"cuMemAllocAsync");
        says(pool, MemoryKind::Unallocated, &["does not pin 64 bytes", &format!("{pool:#x}"), "RDMA-capable"]);
        let addr = buffer.addr().raw();
        drop(buffer);
        says(addr, MemoryKind::Unallocated, &["not in any live CUDA allocation"]);
        let on_stack = [0_u8; 64];
        says(u64::try_from(on_stack.as_ptr().addr()).unwrap(), MemoryKind::Unallocated, &["device pointer"]);
        return;
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        let pins: Vec<_> = ran.calls.iter().filter(|line| line.starts_with("pin")).collect();
        assert!(pins.len() == 1 && pins[0].ends_with("= -22"), "{module:?}: the pool's memory alone: {pins:?}");
        assert_eq!(ran.count("unpin"), 0, "{module:?}");
    }
}

#[test]
fn failures_of_the_pin_call_are_told_apart() {
    const KINDS: [(c_int, ErrorKind, &str); 5] = [
        (libc::EINVAL, ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "GeForce"),
        (libc::ENOMEM, ErrorKind::Bar1Exhausted, "Resizable BAR"),
        (libc::EOPNOTSUPP, ErrorKind::UnsupportedMemory(MemoryKind::Foreign), "Session::alloc"),
        (libc::EIO, ErrorKind::Io(libc::EIO), "gdrdrv did not pin"),
        (libc::EFAULT, ErrorKind::Io(libc::EFAULT), "gdrdrv did not pin"),
    ];
    if inside() {
        let errno: c_int = std::env::var(FAULT).unwrap().split_once(':').unwrap().1.parse().unwrap();
        let (_, kind, words) = KINDS.into_iter().find(|known| known.0 == errno).unwrap();
        let session = open();
        let buffer = session.alloc(4096).unwrap();
        let error = session.pin(&buffer).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(words), "no '{words}' in: {error}");
        assert!(std::error::Error::source(&error).is_some(), "{error}: with the system's word");
        drop(buffer);
        return session.close().unwrap();
    }
    for (module, call) in [(OLDEST, "pin"), (NEWEST, "pin_v2")] {
        for (errno, ..) in KINDS {
            let ran = run(this_test!(), module, &[(FAULT, &format!("{call}:{errno}"))]);
            assert_eq!((ran.count(call), ran.count("unpin"), ran.count("released")), (1, 0, 1), "{ran:?}");
        }
    }
}

#[test]
fn a_pin_is_on_the_gpu_of_its_memory() {
    if inside() {
        let session = open();
        let gpus = session.gpus().unwrap();
        let places: Vec<_> = gpus.iter().map(|gpu| gpu.pci.unwrap().to_string()).collect();
        assert_eq!(places, ["0000:0a:00.0", "0000:0b:00.0"]);
        for (ordinal, gpu) in gpus.iter().enumerate() {
            for how in [Allocator::Buffer, Allocator::CuMemAlloc, Allocator::CuMemCreate] {
                let buffer = session.alloc_as(ordinal, 5 << 20, how).unwrap();
                let mapping = session.pin(&buffer).unwrap().map().unwrap();
                assert_eq!(mapping.facts().pci, gpu.pci, "{how}");
                mapping.write((5 << 20) - 3, b"end").unwrap();
                mapping.flush().unwrap();
                let mut seen = [0; 3];
                buffer.download((5 << 20) - 3, &mut seen).unwrap();
                assert_eq!(&seen, b"end", "{how}");
            }
        }
        return;
    }
    for module in [OLDEST, NEWEST] {
        run(this_test!(), module, &[(GPUS, "2")]);
    }
}

/// What a test outside this process needs to know: where in the file an address is, and which address was freed.
#[test]
fn device_memory_is_a_file_that_others_can_look_into() {
    const BASE: u64 = 0x7d00_0000_0000;
    if inside() {
        let session = open();
        let _first = session.alloc(3 << 20).unwrap();
        let buffer = session.alloc(4096).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        mapping.write(100, b"through the window").unwrap();
        mapping.flush().unwrap();
        let at = usize::try_from(buffer.addr().raw() - BASE).unwrap() + 100;
        let file = fs::read(std::env::var(MEMORY).unwrap()).unwrap();
        assert_eq!(&file[at..at + 18], b"through the window");
        drop(mapping);
        let addr = buffer.addr();
        drop(buffer);
        let freed = fs::read_to_string(std::env::var(FREE).unwrap()).unwrap();
        assert_eq!(freed.trim(), format!("{:x} {:x}", addr.raw(), 2 << 20));
        return;
    }
    let (memory, freed) = (scratch("memory"), scratch("freed"));
    // As small as a device's own memory may be.
    fs::File::create(&memory).unwrap().set_len(16 << 20).unwrap();
    fs::write(&freed, "").unwrap();
    let path = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let base = format!("{BASE:#x}");
    run(this_test!(), NEWEST, &[(MEMORY, &path(&memory)), (FREE, &path(&freed)), (VA, &base)]);
    fs::remove_file(&memory).unwrap();
    fs::remove_file(&freed).unwrap();
}
