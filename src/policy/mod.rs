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
//! The other methods, several threads, an agent on the GPU or its copy engine, are what [`Policy::explain`] recommends;
//! taking one is up to the program, or to an [`AutoCopier`](crate::auto::AutoCopier), which follows a policy in the choice of
//! the method. A routine that the program or `GDRCOPY_COPY` names wins over the policy at every size.
//!
//! # How it is measured
//!
//! Calls back to back in blocks of some 100 us, of all ways in turn in random order, as in a burst: with those workers of a
//! parallel copier awake that such copies wake, and an agent's kernel on the GPU; of each the median. Sizes double, and where
//! the best way changes from one to the next, the size in between is measured as well. Ways within 15 % of the best are
//! measured until each is known to 1 % (95 % interval) or slower beyond doubt, or time is up; their blocks are spread over all
//! of the time. A row ends where the times of its best way and its neighbour's meet. The best method is the plainest that is
//! within the noise of the quickest, 1 to 3 %: a routine, fewer threads, more threads, the agent, the copy engine. Way
//! after way is given up: at a size where it takes more than 4 times the best, and at all larger ones once its time doubles
//! with the size and would take too much of what there is.
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
//! d2h 1-1024 routine=avx512 best=avx512
//! d2h 1025- routine=avx512 best=agent
//! ```
//!
//! `schema` comes first and is required; of the others those that are known. A row names the direction, its first and last
//! size in bytes (none: no end), the size that was measured, the routine of plain copies, and the best method:
//!
//! | name | method |
//! |---|---|
//! | `avx512`, .. | the row's routine on one core |
//! | `parallel-N` | a [`ParallelCopier`](crate::ParallelCopier) of N threads |
//! | `agent` | a [`PushAgent`](crate::agent::PushAgent), with any host memory, through page-locked memory of its own |
//! | `agent_pinned` | the same with page-locked host memory that its kernel reaches directly |
//! | `copy_engine` | what an [`AutoCopier`](crate::auto::AutoCopier) calls: an `SFENCE`, or a [flush](crate::Mapping::flush) where the GPU does not order writes, then [`DeviceBuffer::download`](crate::DeviceBuffer::download) or [`upload`](crate::DeviceBuffer::upload), with ordinary (pageable) host memory |
//! | `copy_engine_pinned` | the same with page-locked host memory |
//! | `cuda_memcpy_pinned` | a synchronous `cuMemcpy` with page-locked host memory, and nothing before it |
//!
//! Behind the bar stands what every candidate took, as a median in nanoseconds: it shows why, and it decides where the best
//! method is not to be had. Candidates that a file lacks, because it was written before they were known or because they were
//! far behind, are not used. The rows of a direction begin at 1 byte, leave no gap and do not overlap, and their routines
//! change no more than three times.

mod arm;
mod built_in;
mod calibrate;
mod choose;
mod measure;
mod method;
mod origin;
#[cfg(feature = "cuda")]
mod rival;
mod routines;
mod subject;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;

pub use calibrate::{Calibration, Progress};
use choose::Cell;
pub(crate) use choose::{Figures, last_of_lower};
pub(crate) use measure::tables;
pub use method::{CopyDirection, CopyMethod};
pub use origin::MeasuredOn;
pub(crate) use routines::Routines;
pub(crate) use subject::{Block, Subject, are_shared, rest, sizes, warm_up};

use crate::backend::BackendKind;
use crate::copy::{self, Routine};
use crate::error::{Error, ErrorKind, Result};
use crate::session::Session;

const OP: &str = "policy";

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

    /// The size in bytes that was measured for these, where one was.
    #[must_use]
    pub fn measured(&self) -> Option<usize> {
        self.row.measured
    }

    /// What each candidate took: median times in nanoseconds. Empty where nothing was measured.
    #[must_use]
    pub fn candidates(&self) -> &[(CopyMethod, f64)] {
        &self.row.candidates
    }

    /// What was measured; `None` where nothing was.
    pub(crate) fn figures(&self) -> Option<Figures<'_>> {
        let measured = self.row.measured.filter(|_| !self.row.candidates.is_empty());
        measured.map(|bytes| Figures { bytes, candidates: &self.row.candidates })
    }

    /// [`Policy::source`].
    #[must_use]
    pub fn source(&self) -> &str {
        &self.policy.source
    }

    /// Which way the bytes go.
    #[must_use]
    pub fn direction(&self) -> CopyDirection {
        self.direction
    }

    /// The figures and where they are from, as text.
    pub(crate) fn why(&self) -> impl fmt::Display {
        Why(*self)
    }
}

struct Why<'a>(Choice<'a>);

impl fmt::Display for Why<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { measured, candidates, .. } = self.0.row;
        match measured.filter(|_| !candidates.is_empty()) {
            Some(bytes) => write!(f, "at {bytes} bytes: {}", text::Candidates(candidates))?,
            None => write!(f, "not measured")?,
        }
        write!(f, "; {}", self.0.source())
    }
}

impl fmt::Display for Choice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { routine, best, .. } = self.row;
        let sizes = text::Sizes(self.row);
        write!(f, "{} of {sizes} bytes: {best} is best, a plain copy uses {routine} ({})", self.direction, self.why())
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

    /// From what was just measured, to the device and from it.
    pub(crate) fn measured(measured_on: MeasuredOn, [h2d, d2h]: [Vec<Cell>; 2]) -> Result<Self> {
        let h2d = choose::rows(CopyDirection::HostToDevice, h2d);
        let d2h = choose::rows(CopyDirection::DeviceToHost, d2h);
        Self::new("measured now".to_owned(), measured_on, h2d, d2h)
    }

    /// From the text of a file, which `source` names.
    #[cfg(test)]
    pub(crate) fn parse(source: &str, text: &str) -> Result<Self> {
        text::parse(source, text)
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
        Ok(self.measured_on.differences(&MeasuredOn::of(session, ordinal)?))
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

    /// What it says about each range of sizes, in ascending order.
    pub(crate) fn choices(&self, direction: CopyDirection) -> impl Iterator<Item = Choice<'_>> {
        self.rows(direction).iter().map(move |row| Choice { policy: self, direction, row })
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
    fn a_file_that_is_not_there_is_named() {
        let error = Policy::read("/no/such/file").unwrap_err();
        let text = "policy: the policy file /no/such/file cannot be read: No such file or directory";
        assert!(error.to_string().starts_with(text), "{error}");
        assert_eq!(error.kind(), ErrorKind::Io(libc::ENOENT));
    }
}
