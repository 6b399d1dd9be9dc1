//! Pins of whole GPU pages, as the C interface makes them, on emulated GPUs.

#![allow(unsafe_code, reason = "pinning pages is unsafe: the allocations must outlive the mapping")]

use gdrcopy::emulated::FaultAt;
use gdrcopy::{BackendKind, ErrorKind, GpuAddr, MemoryKind, P2pTokens, Pinned, Result, Session};

const PAGE: usize = 64 << 10;

fn session() -> Session {
    Session::builder().ignore_env().backend(BackendKind::Emulated).open().expect("needs nothing")
}

fn pin(session: &Session, addr: GpuAddr, len: usize) -> Result<Pinned<'static>> {
    // SAFETY: the tests free no block before its mapping is gone, except where they say so.
    unsafe { session.pin_pages(addr, len, P2pTokens::default()) }
}

fn alloc(session: &Session, bytes: usize) -> GpuAddr {
    session.emulated().expect("emulated").alloc_raw(0, bytes).expect("room")
}

#[test]
fn both_ends_are_rounded_and_neighbours_in_the_page_are_shown() {
    let session = session();
    let (first, second) = (alloc(&session, 512), alloc(&session, 1000));
    let pinned = pin(&session, second, 1000).unwrap();
    assert_eq!((pinned.addr(), pinned.len()), (first, PAGE));
    let mapping = pinned.map().unwrap();
    mapping.write(512, b"to the second").unwrap();
    mapping.write(0, b"to the first").unwrap();
    let gpus = session.emulated().unwrap();
    let mut seen = [0; 13];
    gpus.device_read(second, &mut seen).unwrap();
    assert_eq!(&seen, b"to the second");
    gpus.device_read(first, &mut seen[..12]).unwrap();
    assert_eq!(&seen[..12], b"to the first");
}

#[test]
fn a_rounded_start_need_not_be_allocated_itself() {
    let session = session();
    let (first, second) = (alloc(&session, 512), alloc(&session, 512));
    session.emulated().unwrap().free_raw(first).unwrap();
    assert_eq!(pin(&session, first, PAGE).unwrap().addr(), first);
    assert_eq!(pin(&session, second, PAGE).unwrap().len(), 2 * PAGE);
}

#[test]
fn pages_of_nobody_and_past_the_object_are_refused() {
    let session = session();
    let whole = session.alloc(100).unwrap();
    let kind = |addr, len| pin(&session, addr, len).unwrap_err().kind();
    assert_eq!(pin(&session, whole.addr(), 100).unwrap().len(), PAGE);
    assert_eq!(kind(whole.addr(), PAGE + 1), ErrorKind::OutOfBounds);
    assert_eq!(kind(whole.addr(), 0), ErrorKind::InvalidArgument);
    let beyond = whole.addr().checked_add(PAGE).unwrap();
    assert_eq!(kind(beyond, 1), ErrorKind::UnsupportedMemory(MemoryKind::Unallocated));
    session.emulated().unwrap().fail_next(FaultAt::Pin, ErrorKind::Busy);
    assert_eq!(kind(whole.addr(), 100), ErrorKind::Busy);
}

#[test]
fn a_page_whose_block_was_freed_is_stale() {
    let session = session();
    let block = alloc(&session, 512);
    let _neighbour = alloc(&session, 512);
    let pinned = pin(&session, block, 512).unwrap();
    session.emulated().unwrap().free_raw(block).unwrap();
    assert_eq!(pinned.map().unwrap_err().kind(), ErrorKind::Stale);
}

#[test]
fn a_pin_whose_memory_was_freed_says_so_where_backends_are_told() {
    let config = gdrcopy::emulated::EmulatedConfig::default();
    for (config, revoked) in [(config.clone(), false), (config.sigbus_after_free(), true)] {
        let builder = Session::builder().ignore_env().backend(BackendKind::Emulated);
        let session = builder.emulated(config).open().unwrap();
        let block = alloc(&session, 512);
        let pinned = pin(&session, block, 512).unwrap();
        assert!(!pinned.is_revoked().unwrap());
        session.emulated().unwrap().free_raw(block).unwrap();
        assert_eq!(pinned.is_revoked().unwrap(), revoked);
    }
    assert_eq!(session().module_version(), None);
}
