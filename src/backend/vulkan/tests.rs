//! Importing and mapping on every device that Vulkan shows, a software one above all. The memory comes from Vulkan's own
//! export: what takes it from CUDA is for the suites that need a GPU.

use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use ash::vk;

use super::*;
use crate::error::Feature;
use crate::sys::process::in_forked_child;
use crate::sys::window::PAGE;

/// Set to `software-vulkan` where a software driver is known to be there: nothing may be skipped then.
const REQUIRE: &str = "GDRCOPY_TEST_REQUIRE";

const BYTES: usize = 4 << 20;

const OPAQUE_FD: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;

#[track_caller]
fn skip(name: &str, error: &Error) {
    let required = std::env::var(REQUIRE).is_ok_and(|name| name == "software-vulkan");
    assert!(!required, "{name}: {error}");
    // Past the harness, which swallows what a passing test prints.
    let _ = writeln!(std::io::stderr(), "SKIPPED vulkan, {name}: {error}");
}

/// Runs `check` on every device that can import memory.
fn on_each_gpu(check: impl Fn(&Arc<Gpu>)) {
    let instance = match Loader::open().and_then(|loader| Instance::new(&loader)) {
        Ok(instance) => instance,
        Err(error) => return skip("all devices", &error),
    };
    let devices = instance.devices().unwrap();
    if devices.is_empty() {
        skip("all devices", &choose::device(&[], [0; 16]).unwrap_err());
    }
    for (physical, identity) in devices {
        match Gpu::open(&instance, physical, &identity.name) {
            Ok(gpu) => check(&gpu),
            Err(error) => skip(&identity.name, &error),
        }
    }
}

/// Memory that Vulkan allocates and exports.
struct Exporter {
    gpu: Arc<Gpu>,
    memory: vk::DeviceMemory,
}

impl Exporter {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Self {
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(OPAQUE_FD);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(u64_of(bytes))
            .memory_type_index(gpu.visible.index)
            .push_next(&mut export);
        // SAFETY: the device lives, and the chain outlives the call.
        let memory = unsafe { gpu.device.allocate_memory(&info, None) }.unwrap();
        Self { gpu: Arc::clone(gpu), memory }
    }

    fn fd(&self) -> OwnedFd {
        let calls = ash::khr::external_memory_fd::Device::new(&self.gpu.instance.raw, &self.gpu.device);
        let info = vk::MemoryGetFdInfoKHR::default().memory(self.memory).handle_type(OPAQUE_FD);
        // SAFETY: exportable memory of this device.
        let fd = unsafe { calls.get_memory_fd(&info) }.unwrap();
        // SAFETY: a fresh descriptor that the call made for us.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    fn import(&self) -> Arc<Objects> {
        Arc::new(Objects::import(&self.gpu, std::iter::once(Ok((self.fd(), BYTES)))).unwrap())
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once, never mapped.
        unsafe { self.gpu.device.free_memory(self.memory, None) };
    }
}

fn put(share: &Share, offset: usize, from: &[u8]) {
    assert!(offset + from.len() <= share.bytes());
    // SAFETY: the bytes are in the mapping, which lives while the share does; `from` is memory of its own.
    unsafe { share.at(u64_of(offset)).as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
}

fn get<const N: usize>(share: &Share, offset: usize) -> [u8; N] {
    assert!(offset + N <= share.bytes());
    let mut to = [0; N];
    // SAFETY: as in `put`.
    unsafe { to.as_mut_ptr().copy_from_nonoverlapping(share.at(u64_of(offset)).as_ptr(), N) };
    to
}

/// Whether the page is mapped in the calling process.
fn is_mapped(at: NonNull<u8>) -> bool {
    let page = at.as_ptr().map_addr(|addr| addr & !(PAGE - 1));
    let mut resident = 0;
    // SAFETY: asks about one page; `resident` has room for the answer.
    unsafe { libc::mincore(page.cast(), PAGE, &mut resident) == 0 }
}

/// Tests that count what the process holds, or fork, run one at a time: imports of one hold the other's files open.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Open files of this process that are this one. Other tests open others meanwhile.
fn descriptors(of: &Path) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    open.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().read_link().is_ok_and(|link| link == of))).count()
}

fn link(fd: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())).read_link().unwrap()
}

#[test]
fn imported_memory_is_the_exported_memory() {
    let _alone = alone();
    on_each_gpu(|gpu| {
        let exporter = Exporter::new(gpu, BYTES);
        let (first, second) = (exporter.import(), exporter.import());
        let (first, second) = (Share::of(&first).unwrap(), Share::of(&second).unwrap());
        assert_eq!((first.bytes(), second.bytes()), (BYTES, BYTES));
        assert_ne!(first.at(0), second.at(0), "two imports, two mappings");
        for offset in [0, BYTES / 2 - 3, BYTES - 8] {
            put(&first, offset, b"one way ");
            assert_eq!(&get::<8>(&second, offset), b"one way ");
            put(&second, offset, b"and back");
            assert_eq!(&get::<8>(&first, offset), b"and back");
        }
    });
}

#[test]
fn shares_of_one_import_are_one_mapping() {
    let _alone = alone();
    on_each_gpu(|gpu| {
        let objects = Exporter::new(gpu, BYTES).import();
        let mut first = Share::of(&objects).unwrap();
        let second = Share::of(&objects).unwrap();
        let base = first.at(0);
        assert_eq!(base, second.at(0));
        assert_eq!(first.at(77).addr().get(), base.addr().get() + 77);
        put(&first, 5, b"shared");
        first.release().unwrap();
        first.release().unwrap();
        assert_eq!(&get::<6>(&second, 5), b"shared", "a share that is given back twice takes no other's");
        drop(second);
        // The memory is held and appears again.
        assert_eq!(&get::<6>(&Share::of(&objects).unwrap(), 5), b"shared");
        // The exporter is gone: it is the import that keeps the memory.
    });
}

#[test]
fn a_child_inherits_no_mapping() {
    let _alone = alone();
    on_each_gpu(|gpu| {
        let objects = Exporter::new(gpu, BYTES).import();
        let share = Share::of(&objects).unwrap();
        let inside = [0, BYTES / 2, BYTES - PAGE].map(|offset| share.at(u64_of(offset)));
        put(&share, 0, b"parent");
        assert!(inside.into_iter().all(is_mapped));
        assert!(in_forked_child(|| !inside.into_iter().any(is_mapped)), "the child has pages of it");
        assert_eq!(&get::<6>(&share, 0), b"parent");
    });
}

#[test]
fn an_import_takes_the_descriptor_only_if_it_succeeds() {
    let _alone = alone();
    on_each_gpu(|gpu| {
        let exporter = Exporter::new(gpu, BYTES);
        let memory = link(&exporter.fd());
        let before = descriptors(&memory);
        for _ in 0..20 {
            drop(Share::of(&exporter.import()).unwrap());
        }
        assert_eq!(descriptors(&memory), before, "imports that succeeded");
        // A descriptor that is no memory.
        let path = std::env::temp_dir().join(format!("gdrcopy-no-memory-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        assert_eq!(descriptors(&path), 1);
        for _ in 0..20 {
            let copy = OwnedFd::from(file.try_clone().unwrap());
            let error = Objects::import(gpu, std::iter::once(Ok((copy, BYTES)))).unwrap_err();
            assert_eq!(error.op(), "pin", "{error}");
        }
        assert_eq!(descriptors(&path), 1, "imports that failed");
        std::fs::remove_file(&path).unwrap();
    });
}

#[test]
fn several_objects_lie_side_by_side_or_are_refused() {
    let _alone = alone();
    on_each_gpu(|gpu| {
        let exporters = [(); 3].map(|()| Exporter::new(gpu, BYTES));
        let exported = exporters.iter().map(|exporter| Ok((exporter.fd(), BYTES)));
        let objects = match Objects::import(gpu, exported) {
            Ok(objects) => Arc::new(objects),
            Err(error) => {
                assert!(gpu.placing.is_none(), "{error}");
                assert_eq!(error.kind(), ErrorKind::UnsupportedFeature(Feature::Operation), "{error}");
                assert!(error.to_string().contains("3 cuMemCreate handles"), "{error}");
                return;
            }
        };
        assert!(gpu.placing.is_some());
        let all = Share::of(&objects).unwrap();
        assert_eq!(all.bytes(), 3 * BYTES);
        put(&all, BYTES - 4, b"over the");
        put(&all, 2 * BYTES - 4, b" borders");
        let each = exporters.iter().map(|exporter| Share::of(&exporter.import()).unwrap()).collect::<Vec<_>>();
        assert_eq!(&get::<4>(&each[0], BYTES - 4), b"over");
        assert_eq!(&get::<4>(&each[1], 0), b" the");
        assert_eq!(&get::<4>(&each[1], BYTES - 4), b" bor");
        assert_eq!(&get::<4>(&each[2], 0), b"ders");
    });
}

#[test]
fn devices_are_told_apart_by_their_own_uuid() {
    let _alone = alone();
    let instance = match Loader::open().and_then(|loader| Instance::new(&loader)) {
        Ok(instance) => instance,
        Err(error) => return skip("UUIDs", &error),
    };
    let error = instance.device(*b"nobody's device.").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
    let line = error.to_string();
    assert!(line.contains("no device of Vulkan 1.1 has the UUID of the CUDA device, 6e6f626f647927"), "{line}");
    assert!(line.contains("NVIDIA_DRIVER_CAPABILITIES=all") && line.contains("VK_DRIVER_FILES"), "{line}");
    for (physical, identity) in instance.devices().unwrap() {
        assert!(line.contains(&identity.name), "{line} names {identity:?}");
        if identity.version >= vk::API_VERSION_1_1 {
            assert_ne!(identity.uuid, [0; 16], "{identity:?}");
            assert_eq!(instance.device(identity.uuid).unwrap(), (physical, identity.name));
        }
    }
}

#[test]
fn exported_memory_is_refused_with_the_reason_and_the_way_out() {
    let error = refuse_export();
    assert_eq!((error.op(), error.kind()), ("pin", ErrorKind::UnsupportedFeature(Feature::Operation)));
    let line = error.to_string();
    assert!(line.contains("the size of the whole memory object") && line.contains("use backend 'rm'"), "{line}");
}
