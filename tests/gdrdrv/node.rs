//! The node's own answers, which the library relies on or never provokes: so that what passes over the stand-in passes
//! over the module.

#![allow(unsafe_code, reason = "calls on the node with nothing between")]

use std::ffi::{c_int, c_ulong, c_void};

use gdrcopy::{BackendKind, DeviceBuffer, Session};

use crate::again::{NEWEST, inside, run, this_test};
use crate::common::fork::{in_child, is_readable, is_writable};
use crate::common::standin::{MODULES, Module};

const PIN: c_ulong = 0xc028_da01;
const UNPIN: c_ulong = 0xc008_da02;
const CALLBACK_FLAG: c_ulong = 0xc008_da03;
const INFO: c_ulong = 0xc008_da04;
const INFO_V2: c_ulong = 0xc008_da05;
const ATTRIBUTE: c_ulong = 0xc008_da06;
const PIN_V2: c_ulong = 0xc020_da07;
const REQUEST_TYPE: c_ulong = 0xc008_da08;
const VERSION: c_ulong = 0xc008_daff;

const GPU_PAGE: u64 = 0x1_0000;
const BYTES: usize = 0x3_0000;

/// The argument of a call, as 64-bit words: no call has a longer one.
type Words = [u64; 6];

struct Node(c_int);

impl Node {
    fn open() -> Self {
        // SAFETY: a NUL-terminated path.
        let fd = unsafe { libc::open(c"/dev/gdrdrv".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        Self(fd)
    }

    /// The words afterwards, or the errno.
    fn call(&self, request: c_ulong, mut words: Words) -> Result<Words, c_int> {
        // SAFETY: no call of the module reads or writes more than 48 bytes.
        let result = unsafe { libc::ioctl(self.0, request, words.as_mut_ptr()) };
        if result == 0 { Ok(words) } else { Err(errno()) }
    }

    /// The handle of a pin.
    fn pin(&self, addr: u64, size: u64) -> Result<u64, c_int> {
        self.call(PIN, [addr, size, 0, 0, 0, 0]).map(|words| words[4])
    }

    /// Address and size pinned, and whether it is mapped.
    fn info(&self, handle: u64) -> (u64, u64, bool) {
        let words = self.call(INFO, [handle, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(words[3] & 0xffff_ffff, GPU_PAGE, "the GPU's page");
        let (mapped, write_combining) = (words[5] & 0xffff_ffff, words[5] >> 32);
        assert_eq!(mapped, write_combining, "there is no other kind of mapping");
        (words[1], words[2], mapped == 1)
    }

    fn map_as(&self, handle: u64, len: usize, flags: c_int) -> Result<*mut u8, c_int> {
        let (prot, offset) = (libc::PROT_READ | libc::PROT_WRITE, i64::try_from(handle << 12).unwrap());
        // SAFETY: a mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, self.0, offset) };
        if at == libc::MAP_FAILED { Err(errno()) } else { Ok(at.cast()) }
    }

    fn map(&self, handle: u64, len: usize) -> Result<*mut u8, c_int> {
        self.map_as(handle, len, libc::MAP_SHARED)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this object's own.
        unsafe { libc::close(self.0) };
    }
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn unmap(at: *mut u8, len: usize) {
    // SAFETY: callers unmap what they mapped.
    assert_eq!(unsafe { libc::munmap(at.cast::<c_void>(), len) }, 0);
}

/// Memory, and a node of one's own.
fn start() -> (Session, DeviceBuffer, u64, Node) {
    let session = Session::builder().backend(BackendKind::Gdrdrv).open().unwrap();
    let buffer = session.alloc(BYTES).unwrap();
    let addr = buffer.addr().raw();
    (session, buffer, addr, Node::open())
}

fn on_every_module(test: &str) {
    for module in MODULES {
        run(test, module, &[]);
    }
}

#[test]
fn calls_answer_from_their_version_on() {
    if inside() {
        let module = Module::here().unwrap();
        let minor: u64 = module.version.split_once('.').unwrap().1.parse().unwrap();
        let (_session, _buffer, addr, node) = start();
        let zero = [0; 6];
        assert_eq!(node.call(VERSION, zero).unwrap()[0], 2 << 16 | minor | 2 << 48);
        assert_eq!(node.call(0xc008_db02, zero), Err(libc::EINVAL), "another driver's call");
        assert_eq!(node.call(0xc008_da20, zero), Err(libc::ENOTTY));
        // The pin of version 1 had a shorter argument, and so another number.
        assert_eq!(node.call(0xc020_da01, zero), Err(libc::ENOTTY));
        let handle = node.pin(addr, GPU_PAGE).unwrap();
        let about = [handle, 1, 0, 0, 0, 0];
        for (request, first, words) in [
            (INFO_V2, 4, about),
            (REQUEST_TYPE, 5, about),
            (ATTRIBUTE, 5, [1, 0, 0, 0, 0, 0]),
            (PIN_V2, 5, [addr, GPU_PAGE, 0, 0, 0, 0]),
        ] {
            let wanted = if minor >= first { None } else { Some(libc::ENOTTY) };
            assert_eq!(node.call(request, words).err(), wanted, "{request:#x}");
        }
        if minor >= 5 {
            let persistent = u64::from(module.persistent);
            assert_eq!(node.call(ATTRIBUTE, [1, 0, 0, 0, 0, 0]).unwrap()[0], 1 | persistent << 32);
            assert_eq!(node.call(ATTRIBUTE, [3, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
            let flagged = |flags| node.call(PIN_V2, [addr, GPU_PAGE, flags, 0, 0, 0]).err();
            assert_eq!((flagged(0), flagged(2)), (None, Some(libc::EINVAL)));
            assert_eq!(flagged(1).is_none(), module.persistent, "FORCE_PCIE comes with persistent mode");
            let typed = |kind| node.call(REQUEST_TYPE, [handle, kind, 0, 0, 0, 0]).err();
            assert_eq!((typed(1), typed(2), typed(9)), (None, Some(libc::EOPNOTSUPP), Some(libc::EINVAL)));
            node.map(handle, 4096).unwrap();
            assert_eq!(typed(1), Some(libc::EBUSY));
            assert_eq!(node.call(INFO_V2, about).unwrap()[5] & 0xffff_ffff, 1);
        }
        let token = node.call(PIN, [addr, GPU_PAGE, 1, 0, 0, 0]).err();
        assert_eq!(token, module.persistent.then_some(libc::EINVAL), "tokens are for the other mode");
        return;
    }
    on_every_module(this_test!());
}

#[test]
fn pins_are_of_whole_pages_and_their_handles_apart() {
    if inside() {
        let (_session, _buffer, addr, node) = start();
        for (addr, size) in [(0, GPU_PAGE), (addr, 0), (addr, u64::MAX), (u64::MAX - 1, 1), (addr, 1 << 40), (4096, 1)]
        {
            assert_eq!(node.pin(addr, size), Err(libc::EINVAL), "{size:#x} bytes at {addr:#x}");
        }
        let whole = node.pin(addr, GPU_PAGE + 1).unwrap();
        assert_eq!(node.info(whole), (addr, 2 * GPU_PAGE, false));
        let odd = node.pin(addr + GPU_PAGE + 4096, 1).unwrap();
        assert_eq!(odd, whole + 2 * GPU_PAGE / 4096, "as page numbers, they do not overlap");
        assert_eq!(node.info(odd), (addr + GPU_PAGE, GPU_PAGE, false));
        assert_eq!(node.map(odd, 4096), Err(libc::EINVAL), "it does not start on a page of the GPU's");
        for request in [UNPIN, CALLBACK_FLAG, INFO] {
            assert_eq!(node.call(request, [odd + 1, 0, 0, 0, 0, 0]), Err(libc::EINVAL), "{request:#x}");
        }
        let words = [odd, 0, 0, 0, 0, 0];
        node.call(UNPIN, words).unwrap();
        assert_eq!(node.call(UNPIN, words), Err(libc::EINVAL), "it is gone");
        assert_eq!(node.info(whole).1, 2 * GPU_PAGE, "the other is not");
        return;
    }
    on_every_module(this_test!());
}

#[test]
fn a_pin_has_one_window_until_all_of_it_is_unmapped() {
    const LEN: usize = 0x1_0000;
    if inside() {
        let (_session, buffer, addr, node) = start();
        let handle = node.pin(addr, GPU_PAGE).unwrap();
        assert_eq!(node.map(handle, LEN + 1), Err(libc::EINVAL), "longer than the pin");
        assert_eq!(node.map(handle + 1, 4096), Err(libc::EINVAL), "no such handle");
        assert_eq!(node.map_as(handle, LEN, libc::MAP_PRIVATE), Err(libc::EINVAL));
        let at = node.map(handle, LEN).unwrap();
        assert_eq!(node.map(handle, LEN), Err(libc::EINVAL), "mapped already");
        assert!(node.info(handle).2 && is_writable(at.wrapping_add(5000), 0x77));
        let mut seen = [0];
        buffer.download(5000, &mut seen).unwrap();
        assert_eq!(seen, [0x77]);
        for (from, len, left) in [(0x4000, 0x1000, true), (0, 0x4000, true), (0x5000, LEN - 0x5000, false)] {
            unmap(at.wrapping_add(from), len);
            assert!(!is_readable(at.wrapping_add(from)));
            assert_eq!(node.info(handle).2, left, "after {from:#x}");
        }
        let at = node.map(handle, 1).unwrap();
        assert!(is_readable(at));
        node.call(UNPIN, [handle, 0, 0, 0, 0, 0]).unwrap();
        assert!(!is_readable(at) && !is_writable(at, 1), "unpinned under its window");
        unmap(at, 4096);
        return;
    }
    on_every_module(this_test!());
}

#[test]
fn a_window_keeps_its_file_open() {
    if inside() {
        let (_session, _buffer, addr, node) = start();
        let handle = node.pin(addr, GPU_PAGE).unwrap();
        let at = node.map(handle, 4096).unwrap();
        drop(node);
        assert!(is_readable(at), "closed, but still mapped");
        unmap(at, 4096);
        return;
    }
    for module in MODULES {
        let ran = run(this_test!(), module, &[]);
        assert_eq!((ran.count("open"), ran.count("released")), (2, 2), "{module:?}: {ran:?}");
    }
}

#[test]
fn another_process_is_refused() {
    if inside() {
        let (_session, _buffer, addr, node) = start();
        let handle = node.pin(addr, GPU_PAGE).unwrap();
        let at = node.map(handle, 4096).unwrap();
        in_child(|| {
            for request in [VERSION, UNPIN, INFO, PIN] {
                assert_eq!(node.call(request, [handle, 0, 0, 0, 0, 0]), Err(libc::EACCES), "{request:#x}");
            }
            assert_eq!(node.map(handle, 4096), Err(libc::EACCES));
            assert!(!is_readable(at), "windows are not inherited");
        });
        assert!(is_readable(at) && node.info(handle).2);
        return;
    }
    on_every_module(this_test!());
}

#[test]
fn freeing_the_memory_calls_back_unless_the_pin_keeps_it() {
    if inside() {
        let persistent = Module::here().unwrap().persistent;
        let (session, buffer, addr, node) = start();
        let other = session.alloc(BYTES).unwrap();
        let kept = node.pin(other.addr().raw(), GPU_PAGE).unwrap();
        let (handle, unmapped) = (node.pin(addr, GPU_PAGE).unwrap(), node.pin(addr, GPU_PAGE).unwrap());
        let at = node.map(handle, 4096).unwrap();
        assert!(is_writable(at, 0x55));
        let flag = |handle| node.call(CALLBACK_FLAG, [handle, 0, 0, 0, 0, 0]).unwrap()[1] & 0xffff_ffff;
        assert_eq!([handle, unmapped, kept].map(flag), [0; 3]);
        buffer.free().unwrap();
        let told = u64::from(!persistent);
        assert_eq!([handle, unmapped, kept].map(flag), [told, told, 0]);
        assert_eq!(is_readable(at), persistent);
        assert_eq!(node.map(unmapped, 4096).is_ok(), persistent);
        assert_eq!(node.pin(addr, GPU_PAGE), Err(libc::EINVAL), "nothing is at the address");
        for handle in [handle, unmapped, kept] {
            node.call(UNPIN, [handle, 0, 0, 0, 0, 0]).unwrap();
        }
        assert!(!is_readable(at));
        return;
    }
    on_every_module(this_test!());
}

#[test]
fn pins_that_keep_memory_can_use_it_up() {
    if inside() {
        let session = Session::builder().backend(BackendKind::Gdrdrv).open().unwrap();
        let node = Node::open();
        let bytes = usize::try_from(session.gpus().unwrap()[0].total_bytes).unwrap() / 2;
        let pinned: Vec<_> = (0..2)
            .map(|_| {
                let buffer = session.alloc(bytes).unwrap();
                let handle = node.pin(buffer.addr().raw(), u64::try_from(bytes).unwrap()).unwrap();
                buffer.free().unwrap();
                handle
            })
            .collect();
        assert!(session.alloc(bytes).is_err(), "freed, but still pinned");
        node.call(UNPIN, [pinned[0], 0, 0, 0, 0, 0]).unwrap();
        session.alloc(bytes).unwrap();
        return;
    }
    run(this_test!(), NEWEST, &[]);
}
