//! What has to stand before anything can be timed: a session, a GPU, device memory that the session can pin.

use std::env;

use super::TOOL;
use super::args::{Args, WantedType};
use crate::backend::{Allocator, BackendKind, MappingType, RmLevel};
use crate::buffer::DeviceBuffer;
use crate::builder::SessionBuilder;
use crate::error::{Error, ErrorKind, Feature};
use crate::gpu::GpuInfo;
use crate::mapping::Mapping;
use crate::pinned::Pinned;
use crate::session::Session;
use crate::tool::fail::{Failure, say};

/// Session, GPU and buffer. What the user should know about how they came about is said on standard error.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) session: Session,
    pub(super) gpu: GpuInfo,
    pub(super) buffer: DeviceBuffer,
}

impl Rig {
    pub(super) fn new(args: &Args, bytes: usize) -> Result<Self, Failure> {
        let session = open(args)?;
        let gpu = gpu(&session, args.device)?;
        let buffer = buffer(&session, args, bytes)?;
        Ok(Self { session, gpu, buffer })
    }
}

fn builder(args: &Args) -> SessionBuilder {
    let mut builder = Session::builder();
    if let Some(kind) = args.backend {
        builder = builder.backend(kind);
    }
    if let Some(name) = &args.copy {
        builder = builder.copy_routine(name.as_str());
    }
    builder
}

/// Opens the backend asked for or the best there is; without a GPU, emulated ones.
fn open(args: &Args) -> Result<Session, Failure> {
    let chosen = args.backend.is_some() || is_set("GDRCOPY_BACKEND");
    match open_gpu(args) {
        Err(error) if !chosen && matches!(error.kind(), ErrorKind::NoDriver | ErrorKind::NoDevice) => {
            say(TOOL, &format!("no GPU to measure, so an emulated one is used ({})", error.cause()));
            Ok(builder(args).backend(BackendKind::Emulated).open()?)
        }
        other => Ok(other?),
    }
}

/// Opens with the level that the memory needs: `cuMemAlloc` memory is mapped at level `ipc` only.
fn open_gpu(args: &Args) -> Result<Session, Error> {
    // A level from the environment is the user's word, and other memory needs no more than the default.
    if is_set("GDRCOPY_RM") || matches!(args.allocator, Some(Allocator::Buffer | Allocator::CuMemCreate)) {
        return builder(args).open();
    }
    let session = builder(args).rm(RmLevel::Ipc).open()?;
    // The administrator may have capped it.
    if session.rm_level() == Some(RmLevel::Ipc) {
        say(TOOL, "rm level 'ipc' is used, which maps cuMemAlloc memory; -a buffer does without");
    }
    Ok(session)
}

fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// The GPU with this ordinal.
pub(super) fn gpu(session: &Session, ordinal: usize) -> Result<GpuInfo, Failure> {
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
fn buffer(session: &Session, args: &Args, bytes: usize) -> Result<DeviceBuffer, Failure> {
    if let Some(how) = args.allocator {
        return Ok(pinnable(session, args.device, bytes, how)?);
    }
    match pinnable(session, args.device, bytes, Allocator::CuMemAlloc) {
        Err(error) if is_refusal(error.kind()) => {
            say(TOOL, &format!("cuMemAlloc memory cannot be pinned here ({}); -a buffer is used", error.cause()));
            Ok(pinnable(session, args.device, bytes, Allocator::Buffer)?)
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
pub(super) fn map<'a>(pinned: &Pinned<'a>, wanted: WantedType) -> Result<Mapping<'a>, Failure> {
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
