//! What has to stand before anything can be timed: a session, a GPU, device memory that the session can pin, a thread
//! that stays where it is.

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Parser, ValueEnum};

use super::clock::Clock;
use super::cpu::{self, CpuList};
use super::fail::{self, Failure, say};
use super::host::{self, Host};
use super::interrupt;
use crate::backend::{Allocator, BackendKind, MappingType, RmLevel};
use crate::buffer::DeviceBuffer;
use crate::builder::SessionBuilder;
use crate::copy;
use crate::error::{Error, ErrorKind, Feature};
use crate::gpu::GpuInfo;
use crate::mapping::Mapping;
use crate::pinned::Pinned;
use crate::session::Session;
use crate::sys::num::u64_of;

/// Traffic before the facts are read: an idle link and an idle GPU run slower than they can.
const WAKE_UP: Duration = Duration::from_millis(20);

/// Said above every table of an emulated GPU.
pub const BANNER: &str = "*** EMULATED GPU: host memory stands in for it. These figures say nothing about a GPU. ***";

/// The flags that say what is measured, the same for every program.
#[derive(Args, Debug, Clone)]
pub struct Common {
    /// Ordinal of the GPU
    #[arg(short = 'd', value_name = "N", default_value_t = 0)]
    pub device: usize,

    /// Device memory: cuMemAlloc (default), cuMemCreate, buffer (ours)
    #[arg(short = 'a', value_name = "ALLOCATOR", value_parser = allocator)]
    pub allocator: Option<Allocator>,

    /// Mapping type to insist on: default, wc, cache, device
    #[arg(short = 'M', value_name = "TYPE", value_enum, default_value_t = WantedType::Default, hide_possible_values = true)]
    pub mapping_type: WantedType,

    /// gdrdrv, rm, vulkan or emulated [default: the best there is]
    ///
    /// Without a GPU and without this flag or GDRCOPY_BACKEND, an emulated GPU is measured.
    #[arg(long, value_name = "BACKEND", value_parser = backend)]
    pub backend: Option<BackendKind>,

    /// Copy routine [default: the library's choice for this CPU]
    #[arg(long, value_name = "ROUTINE", value_parser = routine)]
    pub copy: Option<String>,

    /// CPU to measure on [default: the present one, or one next to the GPU]
    #[arg(long, value_name = "N")]
    pub cpu: Option<u32>,
}

/// A mapping type to insist on.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum WantedType {
    /// Whatever the backend maps.
    Default,
    /// Write-combining.
    Wc,
    /// Cached.
    Cache,
    /// Device memory, neither combined nor cached.
    Device,
}

fn allocator(text: &str) -> Result<Allocator, String> {
    text.parse().map_err(|error| hint(&error))
}

fn backend(text: &str) -> Result<BackendKind, String> {
    text.parse().map_err(|error| hint(&error))
}

/// A name that exists. Whether this CPU can run the routine is for the session to say.
fn routine(text: &str) -> Result<String, String> {
    match copy::by_name(text) {
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Err(hint(&error)),
        _ => Ok(text.to_owned()),
    }
}

fn hint(error: &Error) -> String {
    error.hint().unwrap_or_else(|| error.cause()).to_owned()
}

/// Runs a program on its command line, the program's name first: parses, runs, reports failure as one line.
pub fn program<A: Parser>(
    tool: &str,
    args: impl IntoIterator<Item = OsString>,
    run: impl FnOnce(&A) -> Result<(), Failure>,
) -> ExitCode {
    let outcome = match A::try_parse_from(args) {
        Ok(args) => {
            interrupt::catch();
            run(&args)
        }
        Err(error) => fail::clap_outcome(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(tool),
    }
}

/// Session, GPU and buffer. What the user should know about how they came about is said on standard error.
#[derive(Debug)]
pub struct Rig {
    /// The program, for what is said on the way.
    pub tool: &'static str,
    /// On the backend asked for, or the best there is.
    pub session: Session,
    /// The GPU, as it was when the session was opened.
    pub gpu: GpuInfo,
    /// Device memory that the session can pin.
    pub buffer: DeviceBuffer,
}

impl Rig {
    /// Opens a session and allocates `bytes` of device memory.
    ///
    /// # Errors
    ///
    /// One of them cannot be had; the text is fit for the user.
    pub fn new(tool: &'static str, common: &Common, bytes: usize) -> Result<Self, Failure> {
        let session = open(tool, common)?;
        let gpu = gpu(&session, common.device)?;
        let buffer = buffer(tool, &session, common, bytes)?;
        Ok(Self { tool, session, gpu, buffer })
    }

    /// The memory is the host's, so that the figures say nothing about a GPU.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        self.session.backend() == BackendKind::Emulated
    }

    /// Keeps this thread on one CPU, calibrates the clock there, wakes the GPU up by some writes to `mapping` and notes
    /// what will be measured on what.
    ///
    /// # Errors
    ///
    /// The CPU asked for cannot be had, or the mapping fails.
    pub fn settle(&self, common: &Common, mapping: &Mapping<'_>) -> Result<(Host, Clock), Failure> {
        let mut host = Host::read();
        settle_on_cpu(self.tool, common.cpu, &self.gpu, &mut host)?;
        let clock = Clock::calibrate();
        wake_up(mapping)?;
        note_gpu(&mut host, &self.session, common.device)?;
        host.clock = Some(clock.to_string());
        host.allocator = Some(self.buffer.allocator().to_string());
        Ok((host, clock))
    }
}

fn builder(common: &Common) -> SessionBuilder {
    let mut builder = Session::builder();
    if let Some(kind) = common.backend {
        builder = builder.backend(kind);
    }
    if let Some(name) = &common.copy {
        builder = builder.copy_routine(name.as_str());
    }
    builder
}

/// Opens the backend asked for or the best there is; without a GPU, emulated ones.
///
/// # Errors
///
/// It cannot be opened.
pub fn open(tool: &str, common: &Common) -> Result<Session, Failure> {
    let chosen = common.backend.is_some() || is_set("GDRCOPY_BACKEND");
    match open_gpu(tool, common) {
        Err(error) if !chosen && matches!(error.kind(), ErrorKind::NoDriver | ErrorKind::NoDevice) => {
            say(tool, &format!("no GPU to measure, so an emulated one is used ({})", error.cause()));
            Ok(builder(common).backend(BackendKind::Emulated).open()?)
        }
        other => Ok(other?),
    }
}

/// Opens with the level that the memory needs: `cuMemAlloc` memory is mapped at level `ipc` only.
fn open_gpu(tool: &str, common: &Common) -> Result<Session, Error> {
    // A level from the environment is the user's word, and other memory needs no more than the default.
    if is_set("GDRCOPY_RM") || matches!(common.allocator, Some(Allocator::Buffer | Allocator::CuMemCreate)) {
        return builder(common).open();
    }
    let session = builder(common).rm(RmLevel::Ipc).open()?;
    // The administrator may have capped it.
    if session.rm_level() == Some(RmLevel::Ipc) {
        say(tool, "rm level 'ipc' is used, which maps cuMemAlloc memory; -a buffer does without");
    }
    Ok(session)
}

fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// The GPU with this ordinal, as it is now.
///
/// # Errors
///
/// There is none; the text says which there are.
pub fn gpu(session: &Session, ordinal: usize) -> Result<GpuInfo, Failure> {
    let gpus = session.gpus()?;
    let count = gpus.len();
    gpus.into_iter().find(|gpu| gpu.ordinal == ordinal).ok_or_else(|| {
        let there = match count {
            0 => "there is none".to_owned(),
            1 => "the only one is 0".to_owned(),
            n => format!("name one of 0 to {}", n - 1),
        };
        Failure::run(format!("-d {ordinal}: backend {} has no such GPU; {there}", session.backend()))
    })
}

/// Device memory that the session can pin: as asked for, or else `cuMemAlloc`, or else the library's own.
///
/// # Errors
///
/// It cannot be allocated or pinned.
pub fn buffer(tool: &str, session: &Session, common: &Common, bytes: usize) -> Result<DeviceBuffer, Failure> {
    if let Some(how) = common.allocator {
        return Ok(pinnable(session, common.device, bytes, how)?);
    }
    match pinnable(session, common.device, bytes, Allocator::CuMemAlloc) {
        Err(error) if is_refusal(error.kind()) => {
            say(tool, &format!("cuMemAlloc memory cannot be pinned here ({}); -a buffer is used", error.cause()));
            Ok(pinnable(session, common.device, bytes, Allocator::Buffer)?)
        }
        other => Ok(other?),
    }
}

fn pinnable(session: &Session, ordinal: usize, bytes: usize, how: Allocator) -> Result<DeviceBuffer, Error> {
    let buffer = session.alloc_as(ordinal, bytes, how)?;
    session.pin(&buffer)?.unpin()?;
    Ok(buffer)
}

/// Whether a backend said no to this kind of memory, as opposed to failing.
fn is_refusal(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::UnsupportedMemory(_)
            | ErrorKind::UnsupportedFeature(_)
            | ErrorKind::UnknownLayout
            | ErrorKind::PermissionDenied
    )
}

/// Maps as `-M` insists on.
///
/// # Errors
///
/// What the backend reports; for a type it does not map, the flag to leave out.
pub fn map<'a>(pinned: &Pinned<'a>, wanted: WantedType) -> Result<Mapping<'a>, Failure> {
    let (flag, mapped) = match wanted {
        WantedType::Default => return Ok(pinned.map()?),
        WantedType::Wc => ("wc", pinned.map_as(MappingType::WriteCombining)),
        WantedType::Cache => ("cache", pinned.map_as(MappingType::Cached)),
        WantedType::Device => ("device", pinned.map_as(MappingType::Device)),
    };
    mapped.map_err(|error| match error.kind() {
        ErrorKind::UnsupportedFeature(Feature::MappingType) => {
            Failure::run(format!("-M {flag}: {}; leave it out", error.cause()))
        }
        _ => error.into(),
    })
}

/// Moves this thread to the CPU where [`settle_on_cpu`] will keep it, and leaves it free: threads that are started now can
/// find other CPUs, those that are started later cannot.
pub fn approach(common: &Common, gpu: &GpuInfo) {
    let local = gpu.pci.and_then(|pci| host::local_cpus(&pci.to_string()));
    if let Some(cpu) = common.cpu.or_else(|| host::preferred_cpu(local.as_ref())) {
        // What is wrong with that CPU is reported when the thread is to stay there.
        let _ = cpu::visit(cpu);
    }
}

/// Keeps this thread on the CPU asked for, or on one next to the GPU. Threads that CUDA started before stay free to run
/// elsewhere.
///
/// # Errors
///
/// The CPU asked for cannot be had.
pub fn settle_on_cpu(tool: &str, wanted: Option<u32>, gpu: &GpuInfo, host: &mut Host) -> Result<(), Failure> {
    let local = gpu.pci.and_then(|pci| host::local_cpus(&pci.to_string()));
    host.gpu_local_cpus = local.as_ref().map(CpuList::to_string);
    let chosen = match (wanted, host::preferred_cpu(local.as_ref())) {
        (Some(cpu), _) => {
            cpu::pin_to(cpu)?;
            cpu
        }
        (None, Some(cpu)) => {
            if let Err(failure) = cpu::pin_to(cpu) {
                // Some sandboxes forbid it; samples across a move are dropped, so the figures stand.
                say(tool, &format!("{failure}; the thread may move"));
            }
            cpu
        }
        (None, None) => return Ok(()),
    };
    host.set_cpu(chosen);
    if let Some(local) = local.filter(|local| !local.contains(chosen)) {
        say(tool, &format!("CPU {chosen} is not next to the GPU (CPUs {local} are): times will be longer; see --cpu"));
    }
    Ok(())
}

/// Writes to the mapping for a while.
///
/// # Errors
///
/// What the mapping reports.
pub fn wake_up(mapping: &Mapping<'_>) -> Result<(), Error> {
    let bytes = [0; 4096];
    let len = mapping.len().min(bytes.len());
    let begin = Instant::now();
    while begin.elapsed() < WAKE_UP {
        mapping.write(0, &bytes[..len])?;
        mapping.flush()?;
    }
    Ok(())
}

/// Notes the GPU as it is now, and the level of backend `rm`.
///
/// # Errors
///
/// The GPU is gone.
pub fn note_gpu(host: &mut Host, session: &Session, ordinal: usize) -> Result<(), Failure> {
    let gpu = gpu(session, ordinal)?;
    host.gpu = Some(gpu.name);
    host.gpu_ordinal = Some(u64_of(gpu.ordinal));
    host.pci = gpu.pci.map(|pci| pci.to_string());
    host.link_generation = gpu.link.map(|link| link.generation);
    host.link_width = gpu.link.map(|link| link.width);
    host.link_max_generation = gpu.link.map(|link| link.max_generation);
    host.link_max_width = gpu.link.map(|link| link.max_width);
    host.bar1_bytes = gpu.bar1.map(|bar1| bar1.total_bytes);
    host.driver = gpu.driver;
    host.rm_level = session.rm_level().map(|level| level.to_string());
    Ok(())
}
