//! What cannot be mapped is refused by name, with the way out.

use cudarc::driver::sys;
use gdrcopy::{Allocator, BackendKind, DeviceRange, Error, ErrorKind, MemoryKind, RmLevel, Session};

use crate::support::{self, check};

fn refusal(session: &Session, addr: u64, len: usize) -> Error {
    let range = unsafe { DeviceRange::from_raw(addr, len) }.unwrap();
    let error = session.pin(range).expect_err("must be refused");
    println!("{error}");
    assert!(error.hint().is_some(), "{error}");
    assert!(!error.to_string().contains('\n'));
    error
}

#[test]
fn memory_that_cannot_be_pinned() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let anchor = session.alloc(1).unwrap();
    anchor.make_current().unwrap();

    let mut managed = 0;
    unsafe { check(sys::cuMemAllocManaged(&mut managed, 65536, 1)) };
    assert_eq!(refusal(&session, managed, 100).kind(), ErrorKind::UnsupportedMemory(MemoryKind::Managed));
    unsafe { check(sys::cuMemFree_v2(managed)) };

    let mut pooled = 0;
    unsafe { check(sys::cuMemAllocAsync(&mut pooled, 65536, std::ptr::null_mut())) };
    assert_eq!(refusal(&session, pooled, 100).kind(), ErrorKind::UnsupportedMemory(MemoryKind::Pool));
    unsafe { check(sys::cuMemFreeAsync(pooled, std::ptr::null_mut())) };

    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let slice = context.default_stream().alloc_zeros::<u8>(4096).unwrap();
    let error = session.pin(DeviceRange::from_cuda::<u8, _>(&slice).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Pool));
    assert!(error.to_string().contains("Session::alloc"), "{error}");

    let pinned = gdrcopy::cuda::PinnedHost::new(0, 4096).unwrap();
    let host = refusal(&session, pinned.as_ptr() as u64, 100);
    assert_eq!(host.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Host));
    let plain = Box::new([0_u8; 4096]);
    let unknown = refusal(&session, plain.as_ptr() as u64, 100);
    assert_eq!(unknown.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Unallocated));

    for how in [Allocator::CuMemAlloc, Allocator::CuMemCreate] {
        let buffer = session.alloc_as(0, 3 << 20, how).unwrap();
        let addr = buffer.addr().raw();
        let whole = if how == Allocator::CuMemCreate { 4 << 20 } else { 3 << 20 };
        assert_eq!(refusal(&session, addr + 5, whole).kind(), ErrorKind::OutOfBounds, "{how}");
        buffer.free().unwrap();
        let freed = refusal(&session, addr, 100);
        assert_eq!(freed.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Unallocated), "{how}");
    }
}

#[test]
fn vmm_memory_without_a_descriptor_type() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let anchor = session.alloc(1).unwrap();
    anchor.make_current().unwrap();
    let bytes = 2 << 20;
    let (mut base, mut handle) = (0, 0);
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    unsafe {
        check(sys::cuMemAddressReserve(&mut base, bytes, 0, 0, 0));
        check(sys::cuMemCreate(&mut handle, bytes, &prop, 0));
        check(sys::cuMemMap(base, bytes, 0, handle, 0));
    }
    assert_eq!(refusal(&session, base, 100).kind(), ErrorKind::UnsupportedMemory(MemoryKind::NotExportable));
    unsafe {
        check(sys::cuMemUnmap(base, bytes));
        check(sys::cuMemRelease(handle));
        check(sys::cuMemAddressFree(base, bytes));
    }
}

#[test]
fn cuda_malloc_needs_level_ipc() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    let buffer = session.alloc_as(0, 4096, Allocator::CuMemAlloc).unwrap();
    let error = refusal(&session, buffer.addr().raw(), 4096);
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc));
    assert!(error.to_string().contains("GDRCOPY_RM=ipc"), "{error}");
    let off = Session::builder().ignore_env().backend(BackendKind::Rm).rm(RmLevel::Off).open().unwrap_err();
    assert_eq!(off.kind(), ErrorKind::PermissionDenied);
}

#[test]
fn memory_of_another_process() {
    let Some(session) = support::session(RmLevel::Ipc) else { return };
    let anchor = session.alloc(1).unwrap();
    anchor.make_current().unwrap();
    let exe = std::env::current_exe().unwrap();
    let mut owner = std::process::Command::new(exe)
        .args(["--exact", "refusals::foreign_owner", "--nocapture", "--test-threads=1"])
        .env("GDRCOPY_TEST_OWNER", "1")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(owner.stdout.take().unwrap()));
    let words = lines
        .find_map(|line| line.unwrap().split_once("HANDLE ").map(|(_, words)| words.to_owned()))
        .expect("the owner prints its handle");
    let bytes: Vec<u8> = words.split(' ').map(|byte| byte.parse().unwrap()).collect();
    let mut handle: sys::CUipcMemHandle = unsafe { std::mem::zeroed() };
    for (to, from) in handle.reserved.iter_mut().zip(&bytes) {
        *to = *from as _;
    }
    let mut addr = 0;
    unsafe { check(sys::cuIpcOpenMemHandle_v2(&mut addr, handle, 1)) };
    let error = refusal(&session, addr, 100);
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Foreign));
    unsafe { check(sys::cuIpcCloseMemHandle(addr)) };
    drop(owner.stdin.take());
    owner.wait().unwrap();
}

#[test]
fn foreign_owner() {
    if std::env::var_os("GDRCOPY_TEST_OWNER").is_none() {
        return;
    }
    let session = support::session(RmLevel::Ipc).unwrap();
    let buffer = session.alloc_as(0, 3 << 20, Allocator::CuMemAlloc).unwrap();
    buffer.make_current().unwrap();
    let mut handle: sys::CUipcMemHandle = unsafe { std::mem::zeroed() };
    unsafe { check(sys::cuIpcGetMemHandle(&mut handle, buffer.addr().raw())) };
    let words: Vec<String> = handle.reserved.iter().map(|byte| (*byte as u8).to_string()).collect();
    println!("HANDLE {}", words.join(" "));
    // Until the other process is done.
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

#[test]
fn ordinals_that_do_not_exist() {
    let Some(session) = support::session(RmLevel::Vmm) else { return };
    let gpus = session.gpus().unwrap();
    println!("{gpus:#?}");
    let error = session.alloc_on(gpus.len(), 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
    let pci = "ffff:7f:1f.0".parse().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = session.pin_export(std::os::fd::AsFd::as_fd(&file), pci, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
    let error = session.pin_export(std::os::fd::AsFd::as_fd(&file), gpus[0].pci.unwrap(), 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::Foreign), "{error}");
}
