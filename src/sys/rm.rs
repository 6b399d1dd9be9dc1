//! The ioctl interface of NVIDIA's kernel driver to its resource manager (RM), as far as this library uses it.
//!
//! Numbers, classes and layouts are facts of the open kernel modules (MIT), the same in branches 535 to 595; see
//! PROVENANCE.md. Every call has two results: the ioctl's own `errno`, and an RM status in the structure.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::ioctl::{self, wire};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::PciAddress;

/// An RM object, named by a number that is unique within its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub(crate) struct RmHandle(pub(crate) u32);

/// `NV01_ROOT`, `NV01_DEVICE_0`, `NV20_SUBDEVICE_0`.
const CLASS_ROOT: u32 = 0;
const CLASS_DEVICE: u32 = 0x80;
const CLASS_SUBDEVICE: u32 = 0x2080;

const CONTROL_ATTACHED_IDS: u32 = 0x201;
const CONTROL_ID_INFO: u32 = 0x205;
const CONTROL_PROBED_IDS: u32 = 0x214;
const CONTROL_ATTACH_IDS: u32 = 0x215;
const CONTROL_PCI_INFO: u32 = 0x21b;
const CONTROL_IMPORT_FROM_FD: u32 = 0x3d0c;
const CONTROL_SURFACE_INFO: u32 = 0x41_0110;
/// Physical size in 4 KiB pages.
const SURFACE_PAGES: u32 = 7;

const NO_ID: u32 = u32::MAX;
/// `NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_VIDMEM`.
const EXPORTED_VIDEO_MEMORY: u8 = 1;

wire!(Alloc, 48 {
    root: u32 = 0, parent: u32 = 4, new: u32 = 8, class: u32 = 12, params: u64 = 16, rights: u64 = 24,
    params_bytes: u32 = 32, flags: u32 = 36, status: u32 = 40, pad: u32 = 44,
});
wire!(Free, 16 { root: u32 = 0, parent: u32 = 4, object: u32 = 8, status: u32 = 12 });
wire!(Control, 32 {
    client: u32 = 0, object: u32 = 4, command: u32 = 8, flags: u32 = 12, params: u64 = 16, params_bytes: u32 = 24,
    status: u32 = 28,
});
wire!(Duplicate, 28 {
    client: u32 = 0, parent: u32 = 4, object: u32 = 8, source_client: u32 = 12, source_object: u32 = 16,
    flags: u32 = 20, status: u32 = 24,
});
wire!(MapMemory, 56 {
    client: u32 = 0, device: u32 = 4, memory: u32 = 8, pad: u32 = 12, offset: u64 = 16, length: u64 = 24,
    linear_address: u64 = 32, status: u32 = 40, flags: u32 = 44, fd: i32 = 48, tail: u32 = 52,
});
wire!(UnmapMemory, 32 {
    client: u32 = 0, device: u32 = 4, memory: u32 = 8, pad: u32 = 12, linear_address: u64 = 16, status: u32 = 24,
    flags: u32 = 28,
});
wire!(DeviceParams, 56 {
    device: u32 = 0, client_share: u32 = 4, target_client: u32 = 8, target_device: u32 = 12, flags: u32 = 16,
    pad: u32 = 20, va_bytes: u64 = 24, va_start: u64 = 32, va_limit: u64 = 40, va_mode: u32 = 48, tail: u32 = 52,
});
wire!(PciInfo, 12 { id: u32 = 0, domain: u32 = 4, bus: u16 = 8, slot: u16 = 10 });
wire!(AttachIds, 132 { ids: [u32; 32] = 0, failed: u32 = 128 });
wire!(IdInfo, 32 { id: u32 = 0, flags: u32 = 4, device: u32 = 8, subdevice: u32 = 12, tail: [u32; 4] = 16 });
wire!(SurfaceInfo, 16 { count: u32 = 0, pad: u32 = 4, list: u64 = 8 });
wire!(SurfaceFact, 8 { index: u32 = 0, data: u32 = 4 });
wire!(Import, 648 {
    fd: i32 = 0, parent: u32 = 4, objects: [u32; 128] = 8, types: [u8; 128] = 520,
});

/// `_IOWR('F', nr, size)`.
const fn request(number: u8, bytes: usize) -> libc::c_ulong {
    nix::request_code_readwrite!(b'F', number, bytes)
}

/// What went wrong inside RM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RmFailure {
    /// The ioctl itself.
    Errno(i32),
    /// The resource manager.
    Status(u32),
}

/// `NV_ERR_INSUFFICIENT_PERMISSIONS`, `NV_ERR_NO_MEMORY`, `NV_ERR_INSUFFICIENT_RESOURCES`.
pub(crate) const STATUS_NO_PERMISSION: u32 = 0x1b;
pub(crate) const STATUS_NO_MEMORY: u32 = 0x51;
pub(crate) const STATUS_NO_RESOURCES: u32 = 0x1a;
/// `NV_ERR_INVALID_PARAMETER`, `NV_ERR_OUT_OF_RANGE`: past the last object of an export.
pub(crate) const STATUS_INVALID_PARAMETER: u32 = 0x3b;
pub(crate) const STATUS_OUT_OF_RANGE: u32 = 0x5b;

impl RmFailure {
    #[cold]
    pub(crate) fn error(self, op: &'static str, what: &'static str) -> Error {
        match self {
            Self::Errno(errno) => {
                Error::from_errno(op, errno, format!("the NVIDIA driver rejected the call to {what}"))
            }
            Self::Status(status) => {
                let kind = match status {
                    STATUS_NO_PERMISSION => ErrorKind::PermissionDenied,
                    STATUS_NO_MEMORY | STATUS_NO_RESOURCES => ErrorKind::OutOfMemory,
                    _ => ErrorKind::Io(libc::EIO),
                };
                Error::new(op, kind, format!("the NVIDIA driver refused to {what}")).rm(status)
            }
        }
    }
}

/// An open device file of the driver.
#[derive(Debug)]
pub(crate) struct DeviceFile(File);

impl DeviceFile {
    pub(crate) fn open(path: &str) -> Result<Self> {
        ioctl::open(path).map(Self).map_err(|errno| match errno {
            libc::ENOENT | libc::ENXIO | libc::ENODEV => {
                let cause = format!("{path} does not exist or leads nowhere");
                let remedy =
                    "load the NVIDIA driver (nvidia-smi creates its device files), or pass them into the container";
                Error::new("open", ErrorKind::NoDriver, cause).errno(errno).remedy(remedy)
            }
            libc::EACCES | libc::EPERM => ioctl::no_permission(path, errno),
            _ => Error::from_errno("open", errno, format!("{path} cannot be opened")),
        })
    }

    fn call<T>(&self, number: u8, argument: &mut T) -> std::result::Result<(), RmFailure> {
        loop {
            // SAFETY: every request number of this module goes with a structure of the size encoded in it, and all
            // pointers inside refer to live memory of the length stated beside them.
            match unsafe { ioctl::call(&self.0, request(number, size_of::<T>()), argument) } {
                Err(libc::EAGAIN) => {}
                result => return result.map_err(RmFailure::Errno),
            }
        }
    }

    /// Ties a `/dev/nvidiaN` file to the control file that maps through it.
    pub(crate) fn register(&self, control: &Self) -> std::result::Result<(), RmFailure> {
        self.call(0xc9, &mut control.0.as_raw_fd())
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
}

fn status(code: u32) -> std::result::Result<(), RmFailure> {
    if code == 0 { Ok(()) } else { Err(RmFailure::Status(code)) }
}

/// The address of a parameter structure as the driver wants it.
fn address<T>(params: &mut T) -> u64 {
    crate::sys::num::u64_of((&raw mut *params).expose_provenance())
}

fn length<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

/// A client of the resource manager: everything allocated through it goes when it goes.
#[derive(Debug)]
pub(crate) struct Client {
    control: DeviceFile,
    root: RmHandle,
}

type Rm<T> = std::result::Result<T, RmFailure>;

/// What an exported descriptor holds at one index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Imported {
    VideoMemory(RmHandle),
    /// System or fabric memory.
    Other,
    Nothing,
}

impl Client {
    pub(crate) fn open() -> Result<Self> {
        let control = DeviceFile::open("/dev/nvidiactl")?;
        let mut client = Self { control, root: RmHandle(0) };
        client.root = client.alloc_object(RmHandle(0), CLASS_ROOT, None::<&mut u32>).map_err(|failure| {
            failure
                .error("open", "create a client")
                .remedy("a sandbox may filter the driver's calls (gVisor does): run outside it, or use another backend")
        })?;
        Ok(client)
    }

    fn alloc_object<P>(&self, parent: RmHandle, class: u32, params: Option<&mut P>) -> Rm<RmHandle> {
        let params_bytes = if params.is_some() { length::<P>() } else { 0 };
        let mut call = Alloc {
            root: self.root.0,
            parent: parent.0,
            new: 0,
            class,
            params: params.map_or(0, address),
            rights: 0,
            params_bytes,
            flags: 0,
            status: 0,
            pad: 0,
        };
        self.control.call(0x2b, &mut call)?;
        status(call.status).map(|()| RmHandle(call.new))
    }

    pub(crate) fn control_file(&self) -> &DeviceFile {
        &self.control
    }

    fn control<P>(&self, object: RmHandle, command: u32, params: &mut P) -> Rm<()> {
        let mut call = Control {
            client: self.root.0,
            object: object.0,
            command,
            flags: 0,
            params: address(params),
            params_bytes: length::<P>(),
            status: 0,
        };
        self.control.call(0x2a, &mut call)?;
        status(call.status)
    }

    /// The device instance of the GPU at a PCI address, attaching it to this client where it is not yet.
    pub(crate) fn device_instance(&self, pci: PciAddress) -> Rm<Option<u32>> {
        let mut attached = [NO_ID; 32];
        self.control(self.root, CONTROL_ATTACHED_IDS, &mut attached)?;
        let known = attached.into_iter().chain(self.probed_ids()).filter(|id| *id != NO_ID);
        for id in known {
            let mut info = PciInfo { id, domain: 0, bus: 0, slot: 0 };
            if self.control(self.root, CONTROL_PCI_INFO, &mut info).is_err() {
                continue;
            }
            let here = (info.domain, info.bus, info.slot);
            if here != (pci.domain, u16::from(pci.bus), u16::from(pci.device)) {
                continue;
            }
            if !attached.contains(&id) {
                let mut attach = AttachIds { ids: [NO_ID; 32], failed: 0 };
                attach.ids[0] = id;
                self.control(self.root, CONTROL_ATTACH_IDS, &mut attach)?;
            }
            let mut details = IdInfo { id, flags: 0, device: 0, subdevice: 0, tail: [0; 4] };
            self.control(self.root, CONTROL_ID_INFO, &mut details)?;
            return Ok(Some(details.device));
        }
        Ok(None)
    }

    /// Ids of all GPUs of the machine. The structure grew: two lists of 32 up to branch 580, three in later ones.
    fn probed_ids(&self) -> Vec<u32> {
        let mut short = [NO_ID; 64];
        if self.control(self.root, CONTROL_PROBED_IDS, &mut short).is_ok() {
            return short[..32].to_vec();
        }
        let mut long = [NO_ID; 96];
        if self.control(self.root, CONTROL_PROBED_IDS, &mut long).is_ok() {
            return long[..32].to_vec();
        }
        Vec::new()
    }

    /// A device object and its subdevice.
    pub(crate) fn open_device(&self, instance: u32) -> Rm<RmHandle> {
        let mut params = DeviceParams {
            device: instance,
            client_share: 0,
            target_client: 0,
            target_device: 0,
            flags: 0,
            pad: 0,
            va_bytes: 0,
            va_start: 0,
            va_limit: 0,
            va_mode: 0,
            tail: 0,
        };
        let device = self.alloc_object(self.root, CLASS_DEVICE, Some(&mut params))?;
        // Mapping needs a subdevice to exist under the device; it goes with the device.
        let mut subdevice: u32 = 0;
        match self.alloc_object(device, CLASS_SUBDEVICE, Some(&mut subdevice)) {
            Ok(_) => Ok(device),
            Err(failure) => {
                let _ = self.free(self.root, device);
                Err(failure)
            }
        }
    }

    pub(crate) fn free(&self, parent: RmHandle, object: RmHandle) -> Rm<()> {
        let mut call = Free { root: self.root.0, parent: parent.0, object: object.0, status: 0 };
        self.control.call(0x29, &mut call)?;
        status(call.status)
    }

    /// A second handle, in this client, to an object of another client of the same user.
    pub(crate) fn duplicate(&self, device: RmHandle, client: u32, object: u32) -> Rm<RmHandle> {
        let mut call = Duplicate {
            client: self.root.0,
            parent: device.0,
            object: 0,
            source_client: client,
            source_object: object,
            flags: 0,
            status: 0,
        };
        self.control.call(0x34, &mut call)?;
        status(call.status).map(|()| RmHandle(call.object))
    }

    /// Size of a memory object in 4 KiB pages, as the resource manager knows it.
    pub(crate) fn pages(&self, memory: RmHandle) -> Rm<u32> {
        let mut fact = SurfaceFact { index: SURFACE_PAGES, data: 0 };
        let mut params = SurfaceInfo { count: 1, pad: 0, list: address(&mut fact) };
        self.control(memory, CONTROL_SURFACE_INFO, &mut params)?;
        Ok(fact.data)
    }

    /// The `index`-th memory object of those that CUDA exported through `fd`, under a name of ours.
    pub(crate) fn import(&self, device: RmHandle, fd: BorrowedFd<'_>, index: u16, name: RmHandle) -> Rm<Imported> {
        #[repr(C)]
        struct Params {
            head: Import,
            count: u16,
            index: u16,
        }
        // The counters follow the two arrays directly.
        const _: () = assert!(size_of::<Params>() == 652 && std::mem::offset_of!(Params, count) == 648);
        let head = Import { fd: fd.as_raw_fd(), parent: device.0, objects: [0; 128], types: [0; 128] };
        let mut params = Params { head, count: 1, index };
        params.head.objects[0] = name.0;
        self.control(self.root, CONTROL_IMPORT_FROM_FD, &mut params)?;
        match params.head.types[0] {
            0 => Ok(Imported::Nothing),
            EXPORTED_VIDEO_MEMORY => Ok(Imported::VideoMemory(RmHandle(params.head.objects[0]))),
            _ => {
                let _ = self.free(device, RmHandle(params.head.objects[0]));
                Ok(Imported::Other)
            }
        }
    }

    /// Prepares `file`, a fresh one of the GPU, for one mmap of exactly `length` bytes. Returns what `unmap` wants.
    pub(crate) fn map(
        &self,
        device: RmHandle,
        memory: RmHandle,
        offset: u64,
        length: u64,
        file: &DeviceFile,
    ) -> Rm<u64> {
        let mut call = MapMemory {
            client: self.root.0,
            device: device.0,
            memory: memory.0,
            pad: 0,
            offset,
            length,
            linear_address: 0,
            status: 0,
            flags: 0,
            fd: file.0.as_raw_fd(),
            tail: 0,
        };
        self.control.call(0x4e, &mut call)?;
        status(call.status).map(|()| call.linear_address)
    }

    pub(crate) fn unmap(&self, device: RmHandle, memory: RmHandle, linear_address: u64) -> Rm<()> {
        let mut call = UnmapMemory {
            client: self.root.0,
            device: device.0,
            memory: memory.0,
            pad: 0,
            linear_address,
            status: 0,
            flags: 0,
        };
        self.control.call(0x4f, &mut call)?;
        status(call.status)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.root.0 != 0 {
            let _ = self.free(self.root, self.root);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_are_those_of_the_driver() {
        assert_eq!(request(0x2b, size_of::<Alloc>()), 0xc030_462b);
        assert_eq!(request(0x29, size_of::<Free>()), 0xc010_4629);
        assert_eq!(request(0x2a, size_of::<Control>()), 0xc020_462a);
        assert_eq!(request(0x34, size_of::<Duplicate>()), 0xc01c_4634);
        assert_eq!(request(0x4e, size_of::<MapMemory>()), 0xc038_464e);
        assert_eq!(request(0x4f, size_of::<UnmapMemory>()), 0xc020_464f);
        assert_eq!(request(0xc9, size_of::<i32>()), 0xc004_46c9);
    }

    #[test]
    fn a_missing_device_file_is_no_driver() {
        let error = DeviceFile::open("/dev/nvidia-does-not-exist").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoDriver);
        assert!(error.hint().is_some());
    }
}
