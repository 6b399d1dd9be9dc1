//! The backends that a suite runs over: every one that this machine has.

use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};

use gdrcopy::emulated::EmulatedConfig;
use gdrcopy::{
    AfterFree, Allocator, BackendKind, DeviceBuffer, ErrorKind, MappingType, Result, RmLevel, Semantics, Session,
    SessionBuilder,
};

use super::standin::Module;

/// Set to `rm`, `gdrdrv`, `vulkan`, or several with commas, where they are known to be there: what cannot be run then fails
/// instead of being skipped.
const REQUIRE: &str = "GDRCOPY_TEST_REQUIRE";

/// A backend in one of its settings, and what its contract says about it.
#[derive(Debug)]
pub struct Subject {
    pub name: &'static str,
    builder: fn() -> SessionBuilder,
    pub kind: BackendKind,
    pub level: Option<RmLevel>,
    /// The GPU to allocate on.
    pub gpu: usize,
    /// Kinds of memory that it maps.
    pub allocators: &'static [Allocator],
    pub semantics: Semantics,
    pub mapping_type: MappingType,
}

const ALL: &[Allocator] = &[Allocator::Buffer, Allocator::CuMemCreate, Allocator::CuMemAlloc];
const EXPORTABLE: &[Allocator] = &[Allocator::Buffer, Allocator::CuMemCreate];
const PERSISTENT: Semantics = Semantics { whole_object: AfterFree::Persistent, shared_object: AfterFree::Aliased };
const TOLD: Semantics = Semantics { whole_object: AfterFree::Sigbus, shared_object: AfterFree::Aliased };
const SIGBUS: Semantics = Semantics { whole_object: AfterFree::Sigbus, shared_object: AfterFree::Sigbus };

const fn on_emulated(name: &'static str, builder: fn() -> SessionBuilder, gpu: usize, semantics: Semantics) -> Subject {
    let (kind, mapping_type) = (BackendKind::Emulated, MappingType::Cached);
    Subject { name, builder, kind, level: None, gpu, allocators: ALL, semantics, mapping_type }
}

const fn on_rm(
    name: &'static str,
    builder: fn() -> SessionBuilder,
    level: RmLevel,
    allocators: &'static [Allocator],
) -> Subject {
    let (kind, mapping_type) = (BackendKind::Rm, MappingType::WriteCombining);
    Subject { name, builder, kind, level: Some(level), gpu: 0, allocators, semantics: PERSISTENT, mapping_type }
}

const fn on_vulkan(name: &'static str, builder: fn() -> SessionBuilder) -> Subject {
    let (kind, mapping_type) = (BackendKind::Vulkan, MappingType::WriteCombining);
    Subject { name, builder, kind, level: None, gpu: 0, allocators: EXPORTABLE, semantics: PERSISTENT, mapping_type }
}

fn on_gdrdrv(name: &'static str, persistent: bool) -> Subject {
    let semantics = if persistent { PERSISTENT } else { TOLD };
    let (kind, mapping_type) = (BackendKind::Gdrdrv, MappingType::WriteCombining);
    Subject { name, builder: gdrdrv, kind, level: None, gpu: 0, allocators: ALL, semantics, mapping_type }
}

/// Whether the module that the kernel has loaded keeps pinned memory when it is freed.
fn loaded_is_persistent() -> bool {
    std::fs::read_to_string("/proc/driver/gdrdrv/params").is_ok_and(|text| text.contains("persistent mapping: yes"))
}

static SUBJECTS: LazyLock<Vec<Subject>> = LazyLock::new(|| match Module::here() {
    // The others have no use for the stand-in.
    Some(module) => vec![on_gdrdrv("gdrdrv, stand-in", module.persistent)],
    None => vec![
        on_emulated("emulated, persistent", || emulated(EmulatedConfig::default()), 0, PERSISTENT),
        on_emulated("emulated, sigbus", || emulated(EmulatedConfig::default().sigbus_after_free()), 0, SIGBUS),
        on_emulated("emulated, 3 GPUs", || emulated(EmulatedConfig::default().gpus(3)), 2, PERSISTENT),
        on_gdrdrv("gdrdrv", loaded_is_persistent()),
        on_rm("rm, vmm", || rm(RmLevel::Vmm), RmLevel::Vmm, EXPORTABLE),
        on_rm("rm, ipc", || rm(RmLevel::Ipc), RmLevel::Ipc, ALL),
        on_vulkan("vulkan", || Session::builder().ignore_env().backend(BackendKind::Vulkan)),
    ],
});

/// A builder for emulated GPUs, whatever the environment says.
pub fn emulated(config: EmulatedConfig) -> SessionBuilder {
    Session::builder().ignore_env().backend(BackendKind::Emulated).emulated(config)
}

fn gdrdrv() -> SessionBuilder {
    Session::builder().ignore_env().backend(BackendKind::Gdrdrv)
}

fn rm(level: RmLevel) -> SessionBuilder {
    Session::builder().ignore_env().backend(BackendKind::Rm).rm(level)
}

impl Subject {
    pub fn builder(&self) -> SessionBuilder {
        (self.builder)()
    }

    /// A session of its own.
    pub fn session(&self) -> Session {
        self.builder().open().unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// A session of its own, and memory in each way that the backend maps.
    pub fn for_each_buffer(&self, bytes: usize, check: impl Fn(&Session, DeviceBuffer, &str)) {
        for &how in self.allocators {
            let session = self.session();
            let what = format!("{}, {how}, {bytes} bytes", self.name);
            let buffer = session.alloc_as(self.gpu, bytes, how).unwrap_or_else(|error| panic!("{what}: {error}"));
            check(&session, buffer, &what);
        }
    }

    pub fn is_emulated(&self) -> bool {
        self.kind == BackendKind::Emulated
    }

    /// What has to work before anything can be checked.
    fn try_out(&self, session: &Session) -> Result<()> {
        session.gpus()?;
        if self.kind == BackendKind::Vulkan {
            // It is the first pin that looks for the GPU.
            session.pin(&session.alloc_on(self.gpu, 64)?)?;
        }
        Ok(())
    }

    /// Whether a block of this size shares its memory object with others.
    pub fn shares(&self, how: Allocator, bytes: usize) -> bool {
        match how {
            Allocator::CuMemAlloc => bytes < 2 << 20,
            Allocator::Buffer => self.kind == BackendKind::Vulkan && bytes < 64 << 10,
            _ => false,
        }
    }

    /// Why it cannot be run here, in the words of the library.
    fn missing(&self) -> Option<String> {
        let error = self.builder().open().and_then(|session| self.try_out(&session)).err()?;
        let elsewhere = matches!(
            error.kind(),
            ErrorKind::NoDriver | ErrorKind::NoDevice | ErrorKind::PermissionDenied | ErrorKind::UnsupportedFeature(_)
        );
        let asked = std::env::var(REQUIRE).is_ok_and(|names| names.split(',').any(|name| name == self.kind.name()));
        let required = asked || Module::here().is_some();
        assert!(elsewhere && !required && !self.is_emulated(), "{}: {error}", self.name);
        Some(error.to_string())
    }
}

/// Counting what the whole process holds, and forking, want it to themselves.
static PROCESS: RwLock<()> = RwLock::new(());

/// Runs `check` over every backend this machine has, while others run.
pub fn each(check: fn(&Subject)) {
    let _shared = PROCESS.read().unwrap_or_else(PoisonError::into_inner);
    run(check);
}

/// Runs `check` over every backend this machine has, while nothing else runs.
pub fn each_alone(check: fn(&Subject)) {
    let _alone = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    run(check);
}

/// Runs `check` while others run.
pub fn shared(check: fn()) {
    let _shared = PROCESS.read().unwrap_or_else(PoisonError::into_inner);
    check();
}

/// Runs `check` while nothing else runs.
pub fn alone(check: fn()) {
    let _alone = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    check();
}

fn run(check: fn(&Subject)) {
    for subject in SUBJECTS.iter() {
        match subject.missing() {
            None => check(subject),
            Some(reason) => skipped(subject.name, &reason),
        }
    }
}

/// Says so once, past the harness, which swallows what a passing test prints.
fn skipped(name: &'static str, reason: &str) {
    static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.contains(&name) {
        said.push(name);
        let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {reason}");
    }
}

/// Bytes that look like no shift of themselves, and differ from one seed to the next.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    let mut state = u64::try_from(seed).expect("fits") ^ 0x9e37_79b9_7f4a_7c15;
    let mut next = || {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(next());
    }
    bytes.truncate(len);
    bytes
}

/// Says where two byte strings differ first, rather than printing both.
#[track_caller]
pub fn assert_same(found: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    if let Some(at) = found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        panic!("{what}: byte {at} of {} is {:#04x}, not {:#04x}", found.len(), found[at], wanted[at]);
    }
}

/// Device memory as the device's own copy engine shows it.
pub fn downloaded(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.download(0, &mut bytes).expect("the device's copy");
    bytes
}
