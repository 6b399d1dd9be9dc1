//! Which way of copying is best at which size, measured on this machine or taken from a record.
//!
//! A [`Policy`] is a table: for each direction and range of sizes a copy routine, and the best method of all. It is made by
//! measuring ([`Session::calibrate`](crate::Session::calibrate), which nothing calls by itself), kept in a file that a
//! person can read, edit and put under version control, and given to a session by
//! [`SessionBuilder::policy`](crate::SessionBuilder::policy) or `GDRCOPY_POLICY=FILE`. Without one the
//! [built-in table](Policy::built_in) for the processor's family is in force.
//!
//! A policy never changes what a call means. [`Mapping::write`](crate::Mapping::write) and
//! [`read`](crate::Mapping::read) follow it in the choice of the routine alone, and all routines keep the same promises.
//! The other methods, several threads or the GPU's copy engine, are what [`Policy::explain`] recommends; taking one is up
//! to the program. A routine that the program or `GDRCOPY_COPY` names wins over the policy at every size.
//!
//! # The file
//!
//! ```text
//! # comment
//! schema = 1
//! cpu = Intel(R) Xeon(R) Processor
//! gpu = NVIDIA H200
//! link = gen 5 x16
//! backend = rm
//! mapping = WC
//! driver = 580.159.04
//! date = 2026-12-01T12:00:00Z
//!
//! h2d 1-181 measured=128 routine=avx512 best=avx512 | avx512=165.1 cuda_memcpy_pinned=8110.1
//! h2d 182- measured=256 routine=avx512 best=avx512 | avx512=167.8 cuda_memcpy_pinned=8192.0
//! d2h 1- routine=avx512 best=avx512
//! ```
//!
//! `schema` comes first and is required; of the others those that are known. A row names the direction, its first and last
//! size in bytes (none: no end), the size that was measured, the routine of plain copies, and the best method: the routine,
//! `parallel-N` for a [`ParallelCopier`](crate::ParallelCopier) of N threads, or `cuda_memcpy_pinned` for a synchronous
//! `cuMemcpy` with page-locked memory. Behind the bar stands what every candidate took, as a median in nanoseconds: it
//! decides nothing, and shows why. The rows of a direction begin at 1 byte, leave no gap and do not overlap, and their
//! routines change no more than three times.

mod built_in;
mod calibrate;
mod choose;
#[cfg(feature = "cuda")]
mod rival;
mod routines;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

pub use calibrate::{Calibration, Progress};
pub(crate) use routines::Routines;

use crate::backend::BackendKind;
use crate::copy::{self, Routine};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::GpuInfo;
use crate::session::Session;
use crate::sys::cpu;

const OP: &str = "policy";

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "tools", derive(serde::Serialize))]
pub enum CopyDirection {
    /// Writes.
    #[cfg_attr(feature = "tools", serde(rename = "h2d"))]
    HostToDevice,
    /// Reads.
    #[cfg_attr(feature = "tools", serde(rename = "d2h"))]
    DeviceToHost,
}

impl CopyDirection {
    const ALL: [Self; 2] = [Self::HostToDevice, Self::DeviceToHost];

    /// `h2d` or `d2h`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "h2d",
            Self::DeviceToHost => "d2h",
        }
    }

    /// `Host to device` or `Device to host`.
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::HostToDevice => "Host to device",
            Self::DeviceToHost => "Device to host",
        }
    }
}

impl fmt::Display for CopyDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A way to copy.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyMethod {
    /// One core, with the routine of this name.
    Routine(&'static str),
    /// A [`ParallelCopier`](crate::ParallelCopier) of so many threads, the calling one among them.
    Parallel(usize),
    /// A synchronous `cuMemcpy` from or to page-locked host memory.
    CudaMemcpy,
}

const CUDA_MEMCPY: &str = "cuda_memcpy_pinned";
const PARALLEL: &str = "parallel-";

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Routine(name) => f.pad(name),
            Self::Parallel(threads) => f.pad(&format!("{PARALLEL}{threads}")),
            Self::CudaMemcpy => f.pad(CUDA_MEMCPY),
        }
    }
}

impl FromStr for CopyMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == CUDA_MEMCPY {
            return Ok(Self::CudaMemcpy);
        }
        if let Some(threads) = text.strip_prefix(PARALLEL).and_then(|threads| threads.parse().ok()) {
            return Ok(Self::Parallel(threads));
        }
        let routines = copy::routines();
        let routine = routines.iter().find(|routine| routine.name() == text);
        routine.map(|routine| Self::Routine(routine.name())).ok_or_else(|| {
            let names: Vec<_> = routines.iter().map(|routine| routine.name()).collect();
            Error::new(OP, ErrorKind::InvalidArgument, format!("there is no method {text:?}"))
                .remedy(format!("choose one of {}, {PARALLEL}2 and so on, {CUDA_MEMCPY}", names.join(", ")))
        })
    }
}

/// What a policy was measured on, as far as is known.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MeasuredOn {
    /// Model name of the CPU.
    pub cpu: Option<String>,
    /// Product name of the GPU.
    pub gpu: Option<String>,
    /// PCIe link, such as `gen 5 x16`.
    pub link: Option<String>,
    /// Backend.
    pub backend: Option<String>,
    /// Mapping type, such as `WC`.
    pub mapping: Option<String>,
    /// Version of the GPU's driver.
    pub driver: Option<String>,
    /// When, in UTC.
    pub date: Option<String>,
}

impl MeasuredOn {
    /// This machine, as far as it is known without a GPU.
    fn here(backend: BackendKind) -> Self {
        Self { cpu: cpu::model(), backend: Some(backend.name().to_owned()), ..Self::default() }
    }

    fn on(self, gpu: &GpuInfo) -> Self {
        let link = gpu.link.map(|link| format!("gen {} x{}", link.max_generation, link.max_width));
        Self { gpu: Some(gpu.name.clone()), link, driver: gpu.driver.clone(), ..self }
    }

    /// Names and values, in the order of the file.
    fn facts(&self) -> [(&'static str, &Option<String>); 7] {
        [
            ("cpu", &self.cpu),
            ("gpu", &self.gpu),
            ("link", &self.link),
            ("backend", &self.backend),
            ("mapping", &self.mapping),
            ("driver", &self.driver),
            ("date", &self.date),
        ]
    }

    /// What is known of both and differs, but for the date.
    fn differences(&self, here: &Self) -> Vec<String> {
        let pairs = self.facts().into_iter().zip(here.facts()).filter(|((name, _), _)| *name != "date");
        let known = pairs.filter_map(|((name, there), (_, here))| Some((name, there.as_ref()?, here.as_ref()?)));
        known
            .filter(|(_, there, here)| there != here)
            .map(|(name, there, here)| format!("{name}: measured on '{there}', and this is '{here}'"))
            .collect()
    }
}

/// One line of the table.
#[derive(Clone, PartialEq, Debug)]
struct Row {
    first: usize,
    /// `usize::MAX` for no end.
    last: usize,
    measured: Option<usize>,
    routine: &'static str,
    best: CopyMethod,
    /// Median times in nanoseconds.
    candidates: Vec<(CopyMethod, f64)>,
}

/// A table of the best way to copy, by direction and size. See the [module](self).
#[derive(Clone, Debug)]
pub struct Policy {
    source: String,
    measured_on: MeasuredOn,
    h2d: Vec<Row>,
    d2h: Vec<Row>,
    routines: Routines,
}

/// The row of a [`Policy`] that a copy falls into.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    policy: &'a Policy,
    direction: CopyDirection,
    row: &'a Row,
}

impl Choice<'_> {
    /// The routine of [`Mapping::write`](crate::Mapping::write) or [`read`](crate::Mapping::read).
    #[must_use]
    pub fn routine(&self) -> &'static str {
        self.row.routine
    }

    /// The best method, which may be another than the routine.
    #[must_use]
    pub fn best(&self) -> CopyMethod {
        self.row.best
    }

    /// The first and last size that this holds for; `usize::MAX` for no end.
    #[must_use]
    pub fn sizes(&self) -> (usize, usize) {
        (self.row.first, self.row.last)
    }

    /// What each candidate took: median times in nanoseconds. Empty where nothing was measured.
    #[must_use]
    pub fn candidates(&self) -> &[(CopyMethod, f64)] {
        &self.row.candidates
    }
}

impl fmt::Display for Choice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { measured, routine, best, candidates, .. } = self.row;
        let sizes = text::Sizes(self.row);
        write!(f, "{} of {sizes} bytes: {best} is best, a plain copy uses {routine}", self.direction)?;
        match measured.filter(|_| !candidates.is_empty()) {
            Some(bytes) => write!(f, " (at {bytes} bytes: {}", text::Candidates(candidates))?,
            None => write!(f, " (not measured")?,
        }
        write!(f, "; {})", self.policy.source)
    }
}

impl Policy {
    /// The table that is in force without another: for Intel processors with AVX-512 and MOVDIR64B (Sapphire Rapids and
    /// later) from `limits-first.json` and `copylat-compare.json` in `benches/record/2026-12-01-h200`; for others the
    /// [preferred routine](copy::preferred) at every size, unmeasured.
    ///
    /// On those Intel processors, AVX-512 stores 64 bytes and loads all sizes, and AVX2 stores the other sizes: with masked
    /// AVX-512 stores of parts of a line, up to 128 bytes took up to 5 % longer, fence included, and 64 to 512 KiB took
    /// 2 % longer. From 512 KiB on AVX2 loads took 20 % longer than AVX-512 ones. [`Mapping::post_line`](crate::Mapping::post_line) and values of a
    /// whole line follow the row of 64 bytes.
    ///
    /// Its figures of the H200 are one core with each routine against a synchronous `cuMemcpy`. Parallel copies are not in
    /// it, for they differ more than anything from machine to machine: calibrate to have them.
    #[must_use]
    pub fn built_in() -> &'static Self {
        built_in::table()
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, with the line, for what is not a policy of this version; `UnsupportedFeature` for a routine that
    /// this processor lacks; what the system reports where the file cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(|error| file_error("read", path, &error))?;
        text::parse(&path.display().to_string(), &text)
    }

    /// Writes a file that [`Policy::read`] reads.
    ///
    /// # Errors
    ///
    /// What the system reports.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        fs::write(path, self.to_string()).map_err(|error| file_error("written", path, &error))
    }

    /// Where it is from: a file's name, a measurement, or the library.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What it was measured on.
    #[must_use]
    pub fn measured_on(&self) -> &MeasuredOn {
        &self.measured_on
    }

    /// How it differs from this machine and the GPU with this ordinal, a line for each fact. Its figures mean less then.
    ///
    /// # Errors
    ///
    /// As [`Session::gpus`].
    pub fn mismatches(&self, session: &Session, ordinal: usize) -> Result<Vec<String>> {
        let here = MeasuredOn::here(session.backend());
        let gpus = session.gpus()?;
        let gpu = gpus.iter().find(|gpu| gpu.ordinal == ordinal);
        Ok(self.measured_on.differences(&gpu.map_or(here.clone(), |gpu| here.on(gpu))))
    }

    /// As [`Policy::mismatches`], as far as it is known before there is a GPU.
    /// Nothing for the built-in table, which is of another machine as a rule.
    pub(crate) fn early_mismatches(&self, backend: BackendKind) -> Vec<String> {
        if self.source == built_in::SOURCE {
            return Vec::new();
        }
        self.measured_on.differences(&MeasuredOn::here(backend))
    }

    /// What it says about a copy of so many bytes.
    #[must_use]
    pub fn explain(&self, direction: CopyDirection, bytes: usize) -> Choice<'_> {
        let rows = self.rows(direction);
        let row = rows.iter().find(|row| bytes <= row.last).unwrap_or(&rows[0]);
        Choice { policy: self, direction, row }
    }

    fn rows(&self, direction: CopyDirection) -> &[Row] {
        match direction {
            CopyDirection::HostToDevice => &self.h2d,
            CopyDirection::DeviceToHost => &self.d2h,
        }
    }

    pub(crate) fn routines(&self) -> Routines {
        self.routines
    }

    /// From rows that cover every size.
    fn new(source: String, measured_on: MeasuredOn, h2d: Vec<Row>, d2h: Vec<Row>) -> Result<Self> {
        let routines = Routines::new(&classes(&h2d)?, &classes(&d2h)?).ok_or_else(|| {
            let cause =
                format!("{source}: the routines of one direction change more than {} times", routines::MAX_CLASSES - 1);
            Error::new(OP, ErrorKind::InvalidArgument, cause).remedy("let neighbouring rows share a routine")
        })?;
        Ok(Self { source, measured_on, h2d, d2h, routines })
    }
}

/// The last size and the routine of each run of rows with the same one.
fn classes(rows: &[Row]) -> Result<Vec<(usize, &'static Routine)>> {
    let runs = rows.chunk_by(|a, b| a.routine == b.routine).filter_map(|run| run.last());
    runs.map(|row| Ok((row.last, copy::by_name(row.routine)?))).collect()
}

fn file_error(what: &str, path: &Path, error: &std::io::Error) -> Error {
    let cause = format!("the policy file {} cannot be {what}: {error}", path.display());
    let kind = Error::from_errno(OP, error.raw_os_error().unwrap_or(libc::EIO), "").kind();
    Error::new(OP, kind, cause).remedy("correct the path, or calibrate to make one")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_round_trip() {
        for text in ["scalar", "avx512", "movdir64b", "parallel-2", "parallel-16", "cuda_memcpy_pinned"] {
            assert_eq!(text.parse::<CopyMethod>().unwrap().to_string(), text);
        }
        for text in ["", "parallel-", "parallel", "AVX2", "cuda"] {
            let error = text.parse::<CopyMethod>().unwrap_err().to_string();
            assert!(error.contains(&format!("there is no method {text:?}")) && error.contains("avx2"), "{error}");
        }
    }

    #[test]
    fn differences_are_of_what_is_known() {
        let text = |text: &str| Some(text.to_owned());
        let there = MeasuredOn { cpu: text("A"), gpu: text("H200"), date: text("then"), ..MeasuredOn::default() };
        let here = MeasuredOn { cpu: text("B"), driver: text("580"), date: text("now"), ..MeasuredOn::default() };
        assert_eq!(there.differences(&here), ["cpu: measured on 'A', and this is 'B'"]);
        assert!(there.differences(&there).is_empty());
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Policy::read("/no/such/file").unwrap_err();
        let text = "policy: the policy file /no/such/file cannot be read: No such file or directory";
        assert!(error.to_string().starts_with(text), "{error}");
        assert_eq!(error.kind(), ErrorKind::Io(libc::ENOENT));
    }
}
