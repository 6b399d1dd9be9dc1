//! The interface of the kernel module `gdrdrv`, versions 2.0 to 2.6.
//!
//! Most requests carry the size of a pointer, not of their structure: the numbers are an interface and are written out.

use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use super::ioctl::{self, wire};
use crate::error::{Error, ErrorKind, Result};

pub(crate) const NODE: &str = "/dev/gdrdrv";
const PARAMS: &str = "/proc/driver/gdrdrv/params";

const PIN: u64 = 0xc028_da01;
const UNPIN: u64 = 0xc008_da02;
const CALLBACK_FLAG: u64 = 0xc008_da03;
const INFO: u64 = 0xc008_da04;
const INFO_V2: u64 = 0xc008_da05;
const ATTRIBUTE: u64 = 0xc008_da06;
const PIN_V2: u64 = 0xc020_da07;
const REQUEST_TYPE: u64 = 0xc008_da08;
const VERSION: u64 = 0xc008_daff;

/// The interface version this library speaks.
const OURS: Version = Version { major: 2, minor: 6 };
const ATTRIBUTE_PERSISTENT: u32 = 1;

/// A version of the module or of its interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl Version {
    const fn of(word: u32) -> Self {
        Self { major: word >> 16, minor: word & 0xffff }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

wire!(#[derive(Default)] PinWire, 40 { addr: u64 = 0, size: u64 = 8, token: u64 = 16, va_space: u32 = 24, pad: u32 = 28, handle: u64 = 32 });
wire!(#[derive(Default)] PinV2Wire, 32 { addr: u64 = 0, size: u64 = 8, flags: u32 = 16, pad: u32 = 20, handle: u64 = 24 });
wire!(#[derive(Default)] HandleWire, 8 { handle: u64 = 0 });
wire!(#[derive(Default)] FlagWire, 16 { handle: u64 = 0, flag: u32 = 8, pad: u32 = 12 });
wire!(#[derive(Default)] InfoWire, 48 {
    handle: u64 = 0, va: u64 = 8, mapped_size: u64 = 16, page_size: u32 = 24, tsc_khz: u32 = 28, tm_cycles: u64 = 32,
    mapped_or_type: u32 = 40, wc_or_pad: u32 = 44,
});
wire!(#[derive(Default)] AttributeWire, 8 { attribute: u32 = 0, value: u32 = 4 });
wire!(#[derive(Default)] VersionWire, 8 { driver: u32 = 0, minimum: u32 = 4 });

/// How the module maps, in its own numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mapped {
    Not,
    WriteCombining,
    Cached,
    Device,
}

impl Mapped {
    fn of(number: u32) -> Self {
        match number {
            1 => Self::WriteCombining,
            2 => Self::Cached,
            3 => Self::Device,
            _ => Self::Not,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Not => 0,
            Self::WriteCombining => 1,
            Self::Cached => 2,
            Self::Device => 3,
        }
    }
}

/// The opened module.
#[derive(Debug)]
pub(crate) struct Module {
    file: File,
    version: Version,
    persistent: bool,
}

/// The major number of the module, if the kernel lists it.
fn listed_major() -> Option<u64> {
    let devices = fs::read_to_string("/proc/devices").ok()?;
    devices.lines().find_map(|line| line.trim().strip_suffix(" gdrdrv")?.trim().parse().ok())
}

fn node_major() -> Option<u64> {
    fs::metadata(NODE).ok().map(|meta| u64::from(libc::major(meta.rdev())))
}

fn no_driver(cause: String, remedy: impl Into<String>) -> Error {
    Error::new("open", ErrorKind::NoDriver, cause).remedy(remedy.into())
}

fn stale(errno: i32) -> Error {
    let (node, listed) = (node_major(), listed_major());
    let cause = match (node, listed) {
        (Some(node), Some(listed)) if node != listed => {
            format!("{NODE} has major number {node}, but gdrdrv has {listed}: the node is stale")
        }
        (_, None) => format!("{NODE} is left from a module that is no longer loaded"),
        _ => format!("{NODE} belongs to another driver"),
    };
    no_driver(cause, format!("remove {NODE} and load gdrdrv again, or let udev create the node")).errno(errno)
}

fn failed_open(errno: i32) -> Error {
    match errno {
        libc::ENOENT | libc::ENOTDIR => match listed_major() {
            Some(major) => no_driver(
                format!("the module gdrdrv is loaded, but {NODE} does not exist"),
                format!("mknod {NODE} c {major} 0, or pass the device into the container (--device {NODE})"),
            ),
            None => no_driver(
                "the kernel module gdrdrv is not loaded".to_owned(),
                "modprobe gdrdrv, or use another backend",
            ),
        },
        libc::EACCES | libc::EPERM => ioctl::no_permission(NODE, errno),
        libc::ENXIO | libc::ENODEV => stale(errno),
        _ => Error::from_errno("open", errno, format!("{NODE} cannot be opened")),
    }
}

impl Module {
    pub(crate) fn open() -> Result<Self> {
        let file = ioctl::open(NODE).map_err(failed_open)?;
        let mut wire = VersionWire::default();
        // SAFETY: the request writes 8 bytes.
        unsafe { ioctl::call(&file, VERSION, &mut wire) }.map_err(stale)?;
        let (version, minimum) = (Version::of(wire.driver), Version::of(wire.minimum));
        if version < (Version { major: 2, minor: 0 }) {
            let cause = format!("the loaded module gdrdrv is version {version}, which is too old");
            return Err(no_driver(cause, "load version 2.0 or newer"));
        }
        if minimum > OURS {
            let cause = format!("the loaded module gdrdrv {version} wants a library of interface {minimum} or newer");
            return Err(no_driver(cause, format!("update this library, which speaks {OURS}")));
        }
        let mut module = Self { file, version, persistent: false };
        module.persistent = module.asks_persistent();
        Ok(module)
    }

    /// The node as another process opened it, which the module answers with EACCES whatever it is asked.
    #[cfg(feature = "tools")]
    pub(crate) fn of_another_process(file: File) -> Self {
        Self { file, version: OURS, persistent: false }
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    fn since(&self, minor: u32) -> bool {
        self.version >= Version { major: 2, minor }
    }

    /// Whether a pin keeps the memory when it is freed, rather than being told.
    pub(crate) fn persistent(&self) -> bool {
        self.persistent
    }

    fn asks_persistent(&self) -> bool {
        if self.since(5) {
            let mut wire = AttributeWire { attribute: ATTRIBUTE_PERSISTENT, value: 0 };
            // SAFETY: the request reads and writes 8 bytes.
            return unsafe { ioctl::call(&self.file, ATTRIBUTE, &mut wire) }.is_ok() && wire.value != 0;
        }
        // Versions that could be set so, but cannot be asked.
        fs::read_to_string(PARAMS).is_ok_and(|text| text.contains("persistent mapping: yes"))
    }

    /// Pins whole GPU pages. `errno` on failure.
    pub(crate) fn pin(&self, addr: u64, size: u64, (token, va_space): (u64, u32)) -> std::result::Result<u64, i32> {
        // The newer request takes no tokens.
        if self.since(5) && (token, va_space) == (0, 0) {
            let mut wire = PinV2Wire { addr, size, ..PinV2Wire::default() };
            // SAFETY: the request reads and writes 32 bytes.
            return unsafe { ioctl::call(&self.file, PIN_V2, &mut wire) }.map(|()| wire.handle);
        }
        let mut wire = PinWire { addr, size, token, va_space, ..PinWire::default() };
        // SAFETY: the request reads and writes 40 bytes.
        unsafe { ioctl::call(&self.file, PIN, &mut wire) }.map(|()| wire.handle)
    }

    pub(crate) fn unpin(&self, handle: u64) -> Result<()> {
        let mut wire = HandleWire { handle };
        // SAFETY: the request reads 8 bytes.
        ioctl::or_errno(unsafe { ioctl::call(&self.file, UNPIN, &mut wire) }, "unpin", "gdrdrv did not release the pin")
    }

    /// Whether the memory was freed under a pin that is told.
    pub(crate) fn freed(&self, handle: u64) -> Result<bool> {
        let mut wire = FlagWire { handle, ..FlagWire::default() };
        // SAFETY: the request reads and writes 16 bytes.
        let asked = unsafe { ioctl::call(&self.file, CALLBACK_FLAG, &mut wire) };
        ioctl::or_errno(asked, "map", "gdrdrv does not know the pin").map(|()| wire.flag != 0)
    }

    /// How the pin is mapped at the moment.
    pub(crate) fn mapped(&self, handle: u64) -> Result<Mapped> {
        let mut wire = InfoWire { handle, ..InfoWire::default() };
        let newer = self.since(4);
        let request = if newer { INFO_V2 } else { INFO };
        // SAFETY: both requests read and write 48 bytes.
        let asked = unsafe { ioctl::call(&self.file, request, &mut wire) };
        ioctl::or_errno(asked, "map", "gdrdrv does not know the pin")?;
        Ok(match (newer, wire.mapped_or_type != 0, wire.wc_or_pad != 0) {
            (true, ..) => Mapped::of(wire.mapped_or_type),
            (false, false, _) => Mapped::Not,
            (false, true, true) => Mapped::WriteCombining,
            (false, true, false) => Mapped::Cached,
        })
    }

    /// Asks that the pin be mapped so. `false` if this version of the module cannot be asked.
    pub(crate) fn request(&self, handle: u64, want: Mapped) -> std::result::Result<bool, i32> {
        if !self.since(5) {
            return Ok(false);
        }
        let mut wire = FlagWire { handle, flag: want.number(), pad: 0 };
        // SAFETY: the request reads 16 bytes.
        unsafe { ioctl::call(&self.file, REQUEST_TYPE, &mut wire) }.map(|()| true)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
