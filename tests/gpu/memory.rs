//! Right bytes in the right place, for every allocator, size and position.

use std::sync::Arc;

use cudarc::driver::sys;
use gdrcopy::{AfterFree, Allocator, DeviceRange, ErrorKind, PciAddress, RmLevel, Session};

use crate::support::{self, check, pattern};

const MIB: usize = 1 << 20;
const SIZES: [usize; 9] = [1, 100, 4096, 70000, MIB, 2 * MIB + 1, 3 * MIB, 33 * MIB, (1 << 30) + 12345];

/// Writes and reads `len` bytes at `offset` of the range both ways.
fn exchange(buffer: &gdrcopy::DeviceBuffer, mapping: &gdrcopy::Mapping<'_>, start: usize, offset: usize, len: usize) {
    let there = pattern((start + offset + len) as u64, len);
    mapping.write(offset, &there).unwrap();
    mapping.flush().unwrap();
    let mut seen = vec![0; len];
    buffer.download(start + offset, &mut seen).unwrap();
    assert_eq!(seen, there, "written through BAR1 at {start}+{offset}, {len} bytes");
    let back = pattern((start + offset) as u64 ^ 0xffff_0000, len);
    buffer.upload(start + offset, &back).unwrap();
    mapping.read(offset, &mut seen).unwrap();
    assert_eq!(seen, back, "read through BAR1 at {start}+{offset}, {len} bytes");
}

pub(crate) fn all_positions(session: &Session, how: Allocator, size: usize) {
    let buffer = session.alloc_as(0, size, how).unwrap();
    assert_eq!(buffer.addr().raw() % 64, 0);
    // The whole of it: head, quarters, tail, and the last byte alone.
    {
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        assert_eq!(mapping.len(), size);
        assert_eq!(mapping.gpu_addr(), buffer.addr());
        let step = size.min(5000);
        for offset in [0, size / 4, size / 2, size / 4 * 3, size - step] {
            exchange(&buffer, &mapping, 0, offset, step.min(size - offset));
        }
        exchange(&buffer, &mapping, 0, size - 1, 1);
        if size > 3 {
            exchange(&buffer, &mapping, 0, 1, size.min(777) - 2);
        }
    }
    // Parts of it: head, middle, tail and unaligned interior.
    for (start, len) in [(0, 1), (size / 2, size / 3), (size - 1, 1), (size / 3, 65), (4097, 8192), (MIB - 3, 70001)] {
        if len == 0 || start + len > size {
            continue;
        }
        let range = DeviceRange::from(&buffer).slice(start..start + len).unwrap();
        let mapping = session.pin(range).unwrap().map().unwrap();
        assert_eq!(mapping.len(), len);
        let step = len.min(3001);
        exchange(&buffer, &mapping, start, 0, step);
        exchange(&buffer, &mapping, start, len - step, step);
    }
}

#[test]
fn every_size_and_position_of_every_allocator() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    for how in [Allocator::Buffer, Allocator::CuMemCreate, Allocator::CuMemAlloc] {
        for size in SIZES {
            let started = std::time::Instant::now();
            all_positions(&session, how, size);
            println!("{how} of {size} bytes: right at every position ({:?})", started.elapsed());
        }
    }
}

#[test]
fn one_mapping_over_several_vmm_handles() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    over_several_handles(&session);
}

pub(crate) fn over_several_handles(session: &Session) {
    let anchor = session.alloc(1).unwrap();
    anchor.make_current().unwrap();
    let bytes = 2 * MIB;
    let mut base = 0;
    let mut handles = [0; 3];
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let access = sys::CUmemAccessDesc {
        location: prop.location,
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    unsafe {
        check(sys::cuMemAddressReserve(&mut base, 3 * bytes, 0, 0, 0));
        for (n, handle) in handles.iter_mut().enumerate() {
            check(sys::cuMemCreate(handle, bytes, &prop, 0));
            check(sys::cuMemMap(base + (n * bytes) as u64, bytes, 0, *handle, 0));
        }
        check(sys::cuMemSetAccess(base, 3 * bytes, &access, 1));
    }
    // From the middle of the first to the middle of the last, at odd bytes.
    let (start, len) = (MIB + 13, 4 * MIB - 7);
    let range = unsafe { DeviceRange::from_raw(base + start as u64, len) }.unwrap();
    let mapping = session.pin(range).unwrap().map().unwrap();
    let data = pattern(7, len);
    mapping.write(0, &data).unwrap();
    mapping.flush().unwrap();
    let mut seen = vec![0; len];
    unsafe { check(sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), base + start as u64, len)) };
    assert!(seen == data);
    // Past the last handle there is nothing.
    let beyond = unsafe { DeviceRange::from_raw(base + start as u64, 5 * MIB) }.unwrap();
    assert_eq!(session.pin(beyond).unwrap_err().kind(), ErrorKind::OutOfBounds);
    drop(mapping);
    unsafe {
        check(sys::cuMemUnmap(base, 3 * bytes));
        for handle in handles {
            check(sys::cuMemRelease(handle));
        }
        check(sys::cuMemAddressFree(base, 3 * bytes));
    }
}

#[test]
fn a_block_of_its_own_object_keeps_its_old_bytes() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    for how in [Allocator::CuMemAlloc, Allocator::CuMemCreate, Allocator::Buffer] {
        let size = 3 * MIB;
        let buffer = session.alloc_as(0, size, how).unwrap();
        let addr = buffer.addr();
        let range = unsafe { DeviceRange::from_raw(addr, size) }.unwrap();
        let pinned = session.pin(range).unwrap();
        let mapping = pinned.map().unwrap();
        assert_eq!(mapping.facts().after_free, AfterFree::Persistent);
        let old = pattern(1, size);
        mapping.write(0, &old).unwrap();
        buffer.free().unwrap();
        // The same address again, on other memory.
        let others: Vec<_> = (0..8).map(|_| session.alloc_as(0, size, how).unwrap()).collect();
        let reused = others.iter().any(|other| other.addr() == addr);
        for other in &others {
            other.upload(0, &pattern(2, size)).unwrap();
        }
        let mut seen = vec![0; size];
        mapping.read(0, &mut seen).unwrap();
        assert!(seen == old, "{how}: the old bytes stay");
        mapping.write(0, &pattern(3, size)).unwrap();
        mapping.flush().unwrap();
        for other in &others {
            other.download(0, &mut seen).unwrap();
            assert!(seen == pattern(2, size), "{how}: writes reach nobody else's memory");
        }
        drop(mapping);
        assert_eq!(pinned.map().unwrap_err().kind(), ErrorKind::Stale, "{how}");
        println!("{how}: old bytes stayed; the address was given out again: {reused}");
    }
}

#[test]
fn a_small_block_aliases_its_next_owner() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let size = 5000;
    // A neighbour keeps the shared object alive.
    let _neighbour = session.alloc_as(0, size, Allocator::CuMemAlloc).unwrap();
    let buffer = session.alloc_as(0, size, Allocator::CuMemAlloc).unwrap();
    assert!(!buffer.owns_object());
    let addr = buffer.addr();
    let range = unsafe { DeviceRange::from_raw(addr, size) }.unwrap();
    let pinned = session.pin(range).unwrap();
    let mapping = pinned.map().unwrap();
    assert_eq!(mapping.facts().after_free, AfterFree::Aliased);
    mapping.write(0, &pattern(1, size)).unwrap();
    buffer.free().unwrap();
    let mut kept = Vec::new();
    let next = loop {
        let next = session.alloc_as(0, size, Allocator::CuMemAlloc).unwrap();
        if next.addr() == addr {
            break next;
        }
        kept.push(next);
        assert!(kept.len() < 1000, "CUDA hands a small freed block out again");
    };
    next.upload(0, &pattern(2, size)).unwrap();
    let mut seen = vec![0; size];
    mapping.read(0, &mut seen).unwrap();
    assert_eq!(seen, pattern(2, size), "the old mapping shows the next owner's bytes");
    mapping.write(100, b"seen by the next owner").unwrap();
    mapping.flush().unwrap();
    next.download(100, &mut seen[..22]).unwrap();
    assert_eq!(&seen[..22], b"seen by the next owner");
    // What a new map finds is another allocation, and it says so.
    drop(mapping);
    assert_eq!(pinned.map().unwrap_err().kind(), ErrorKind::Stale);
}

#[test]
fn exported_memory_is_mapped_without_cuda() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    let buffer = Arc::new(session.alloc(40 * MIB).unwrap());
    let data = pattern(11, 40 * MIB);
    buffer.upload(0, &data).unwrap();
    let pci: PciAddress = session.gpus().unwrap()[0].pci.unwrap();
    let fd = buffer.export().unwrap();
    // Inherited by the child on purpose.
    assert_eq!(unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&fd), libc::F_SETFD, 0) }, 0);
    let number = std::os::fd::AsRawFd::as_raw_fd(&fd).to_string();
    let output =
        support::alone("memory::importer", &[("GDRCOPY_TEST_FD", &number), ("GDRCOPY_TEST_PCI", &pci.to_string())]);
    support::assert_success(&output);
    let mut seen = vec![0; 100];
    buffer.download(33 * MIB + 5, &mut seen).unwrap();
    assert_eq!(seen, pattern(12, 100), "written by the process without CUDA");
    let error = session.pin_export(std::os::fd::AsFd::as_fd(&fd), pci, 1 << 40).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
}

#[test]
fn importer() {
    let (Ok(fd), Ok(pci)) = (std::env::var("GDRCOPY_TEST_FD"), std::env::var("GDRCOPY_TEST_PCI")) else { return };
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.parse().unwrap()) };
    let session = support::session(RmLevel::Vmm).unwrap();
    let started = std::time::Instant::now();
    let mapping = session.pin_export(fd, pci.parse().unwrap(), 40 * MIB).unwrap().map().unwrap();
    println!("imported and mapped in {:?}", started.elapsed());
    let data = pattern(11, 40 * MIB);
    for offset in [0, 31 * MIB, 32 * MIB - 50, 40 * MIB - 5000] {
        let mut seen = vec![0; 5000];
        mapping.read(offset, &mut seen).unwrap();
        assert_eq!(seen, data[offset..offset + 5000], "at {offset}");
    }
    mapping.write(33 * MIB + 5, &pattern(12, 100)).unwrap();
    mapping.flush().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libcuda.so") || !maps.contains("nvidia-uvm"), "no CUDA context was made here");
}

#[test]
fn a_kernel_reads_what_was_written_and_answers() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    kernel_answers(&session);
}

pub(crate) fn kernel_answers(session: &Session) {
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let buffer = session.alloc_on(0, 4096).unwrap();
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    mapping.store_u64(0, 0).unwrap();
    mapping.flush().unwrap();
    let lent = buffer.as_cuda::<u32>(&stream).unwrap();
    assert_eq!(lent.len(), 1024);
    let echo = support::kernel(c"echo");
    echo.launch(stream.cu_stream(), buffer.addr().raw());
    mapping.store_u32(0, 21).unwrap();
    let started = std::time::Instant::now();
    while mapping.load_u32(4).unwrap() == 0 {
        assert!(started.elapsed().as_secs() < 10, "the kernel sees the store");
    }
    assert_eq!(mapping.load_u32(4).unwrap(), 42);
    stream.synchronize().unwrap();
    drop(lent);
    // Lending freed nothing.
    mapping.write(100, b"still here").unwrap();
    mapping.flush().unwrap();
    let mut seen = [0; 10];
    buffer.download(100, &mut seen).unwrap();
    assert_eq!(&seen, b"still here");
    // The other way round: the buffer's own view of a cudarc loan.
    let lent = buffer.as_cuda::<u8>(&stream).unwrap();
    let range = DeviceRange::from_cuda::<u8, _>(&*lent).unwrap();
    assert_eq!((range.addr(), range.len()), (buffer.addr(), 4096));
}

#[test]
fn cuda_malloc_memory_of_a_context_of_its_own() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let anchor = session.alloc(1).unwrap();
    anchor.make_current().unwrap();
    let mut context = std::ptr::null_mut();
    let mut addr = 0;
    let len = 70000;
    unsafe {
        check(sys::cuCtxCreate_v2(&mut context, 0, 0));
        check(sys::cuMemAlloc_v2(&mut addr, len));
    }
    let range = unsafe { DeviceRange::from_raw(addr, len) }.unwrap();
    let mapping = session.pin(range).unwrap().map().unwrap();
    let data = pattern(21, len);
    mapping.write(0, &data).unwrap();
    mapping.flush().unwrap();
    let mut seen = vec![0; len];
    unsafe { check(sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), addr, len)) };
    assert!(seen == data);
    drop(mapping);
    unsafe {
        check(sys::cuMemFree_v2(addr));
        check(sys::cuCtxDestroy_v2(context));
    }
}

/// Objects and addresses are given out again all the time, and every pin still finds its own memory.
#[test]
fn a_churn_of_cuda_malloc_blocks() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let mut live = Vec::new();
    let mut state = 12345_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for round in 0..1500_u64 {
        if live.len() > 60 || !live.is_empty() && random(3) == 0 {
            drop(live.swap_remove(random(live.len())));
            continue;
        }
        let range = [500, 40_000, 300_000, 2_090_000, 9 << 20][random(5)];
        let buffer = session.alloc_as(0, 1 + random(range), Allocator::CuMemAlloc).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let step = buffer.len().min(200);
        let (there, mut seen) = (pattern(round, step), vec![0; step]);
        mapping.write(buffer.len() - step, &there).unwrap();
        mapping.flush().unwrap();
        buffer.download(buffer.len() - step, &mut seen).unwrap();
        assert!(seen == there, "round {round}");
        drop(mapping);
        live.push(buffer);
    }
}
