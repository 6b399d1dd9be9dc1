//! Backend `vulkan`: the same memory, reached through documented calls alone.

use std::os::fd::AsFd;

use gdrcopy::{
    AfterFree, Allocator, BackendKind, DeviceBuffer, DeviceRange, ErrorKind, Feature, MemoryKind, RmLevel, Session,
};

use crate::memory::{all_positions, kernel_answers, over_several_handles};
use crate::support::{self, opened, pattern};

const MIB: usize = 1 << 20;

/// A session that has found its GPU, which only the first pin looks for.
fn session() -> Option<Session> {
    let session = Session::builder().ignore_env().backend(BackendKind::Vulkan).open().and_then(|session| {
        let started = std::time::Instant::now();
        session.pin(&session.alloc_on(0, 64)?)?;
        println!("the first pin took {:?}", started.elapsed());
        Ok(session)
    });
    opened(session, BackendKind::Vulkan)
}

#[test]
fn vulkan_every_size_and_position() {
    let Some(session) = session() else { return };
    for how in [Allocator::Buffer, Allocator::CuMemCreate] {
        for size in [1, 100, 4096, 65_535, 65_536, MIB, 2 * MIB + 1, 33 * MIB, (1 << 30) + 12345] {
            all_positions(&session, how, size);
        }
    }
}

#[test]
fn vulkan_four_gib() {
    let Some(session) = session() else { return };
    all_positions(&session, Allocator::Buffer, 4 << 30);
}

#[test]
fn vulkan_several_vmm_handles() {
    let Some(session) = session() else { return };
    over_several_handles(&session);
}

#[test]
fn vulkan_a_kernel_reads_and_answers() {
    let Some(session) = session() else { return };
    kernel_answers(&session);
}

#[test]
fn vulkan_cuda_malloc_is_refused() {
    let Some(session) = session() else { return };
    let buffer = session.alloc_as(0, 3 * MIB, Allocator::CuMemAlloc).unwrap();
    let error = session.pin(&buffer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnsupportedMemory(MemoryKind::CudaMalloc), "{error}");
    println!("{error}");
}

/// Buffers of this backend go to other processes as those of any other; taking them in is for backend rm.
#[test]
fn vulkan_exports_and_does_not_import() {
    let (Some(session), Some(rm)) = (session(), support::session(RmLevel::Vmm)) else { return };
    let gpu = session.gpus().unwrap()[0].pci.unwrap();
    for (how, bytes) in [(Allocator::Buffer, 2 * MIB), (Allocator::CuMemCreate, 4096)] {
        let buffer = session.alloc_as(0, bytes, how).unwrap();
        let fd = buffer.export().unwrap();
        let refused = session.pin_export(fd.as_fd(), gpu, bytes).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::UnsupportedFeature(Feature::Operation), "{refused}");
        assert!(refused.to_string().contains("use backend 'rm'"), "{refused}");
        let there = rm.pin_export(fd.as_fd(), gpu, bytes).unwrap().map().unwrap();
        let here = session.pin(&buffer).unwrap().map().unwrap();
        let data = pattern(37, bytes);
        there.write(0, &data).unwrap();
        there.flush().unwrap();
        let mut seen = vec![0; bytes];
        here.read(0, &mut seen).unwrap();
        assert!(seen == data, "{how}, {bytes} bytes");
    }
}

/// Where the window is, as seen from the device address: the same for all ranges of one mapping.
fn distance(session: &Session, range: DeviceRange<'_>) -> usize {
    let mapping = session.pin(range).unwrap().map().unwrap();
    mapping.as_ptr().addr().wrapping_sub(usize::try_from(mapping.gpu_addr().raw()).unwrap())
}

#[test]
fn vulkan_small_buffers_share_one_import() {
    let Some(session) = session() else { return };
    let buffers: Vec<DeviceBuffer> = (0..1000).map(|_| session.alloc_on(0, 2000).unwrap()).collect();
    let pins: Vec<_> = buffers.iter().map(|buffer| session.pin(buffer).unwrap()).collect();
    let mappings: Vec<_> = pins.iter().map(|pin| pin.map().unwrap()).collect();
    let first = distance(&session, DeviceRange::from(&buffers[0]));
    for ((buffer, mapping), seed) in buffers.iter().zip(&mappings).zip(0..) {
        assert!(!buffer.owns_object() && buffer.addr().raw().is_multiple_of(64));
        assert_eq!(mapping.facts().after_free, AfterFree::Aliased);
        assert_eq!(distance(&session, DeviceRange::from(buffer)), first, "all in one mapping");
        mapping.write(0, &pattern(seed, 2000)).unwrap();
    }
    mappings[0].flush().unwrap();
    for (buffer, seed) in buffers.iter().zip(0..) {
        let mut seen = vec![0; 2000];
        buffer.download(0, &mut seen).unwrap();
        assert_eq!(seen, pattern(seed, 2000), "buffer {seed} has its own bytes");
    }
    // A descriptor would hand the others over, too.
    assert_eq!(buffers[0].export().unwrap_err().op(), "export");
    // The next byte is somebody else's.
    // SAFETY: never mapped, since it is refused.
    let beyond = unsafe { DeviceRange::from_raw(buffers[0].addr(), 2001) }.unwrap();
    assert_eq!(session.pin(beyond).unwrap_err().kind(), ErrorKind::OutOfBounds);
}

#[test]
fn vulkan_and_rm_show_the_same_memory() {
    let (Some(session), Some(rm)) = (session(), support::session(RmLevel::Vmm)) else { return };
    for bytes in [4096, 5 * MIB + 3] {
        let buffer = session.alloc_on(0, bytes).unwrap();
        let here = session.pin(&buffer).unwrap().map().unwrap();
        let there = rm.pin(&buffer).unwrap().map().unwrap();
        assert_eq!(here.mapping_type(), there.mapping_type());
        let data = pattern(31, bytes);
        here.write(0, &data).unwrap();
        here.flush().unwrap();
        let mut seen = vec![0; bytes];
        there.read(0, &mut seen).unwrap();
        assert!(seen == data, "{bytes} bytes");
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn vulkan_cycles_are_flat() {
    let Some(session) = session() else { return };
    let bar1 = || session.gpus().unwrap()[0].bar1.map(|bar1| bar1.used_bytes);
    let cycle = |bytes| {
        let buffer = session.alloc_on(0, bytes).unwrap();
        session.pin(&buffer).unwrap().map().unwrap().write(bytes - 1, &[1]).unwrap();
    };
    for bytes in [4096, 3 * MIB] {
        (0..20).for_each(|_| cycle(bytes));
        let before = (descriptors(), bar1());
        (0..1000).for_each(|_| cycle(bytes));
        assert_eq!((descriptors(), bar1()), before, "open files and BAR1, {bytes} bytes");
    }
}
