//! The quickest way of copying at each size, found by measuring and then taken.

mod measure;
mod options;

use std::fmt;
use std::sync::Arc;

pub use options::AutoOptions;

use crate::agent::PushAgent;
use crate::buffer::DeviceBuffer;
use crate::copy::ParallelCopier;
use crate::error::Result;
use crate::mapping::Mapping;
use crate::policy::CopyDirection;
use crate::range::DeviceRange;
use crate::session::Session;

/// A way in which an [`AutoCopier`] copies.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AutoMethod {
    /// The calling thread's own loads and stores: [`Mapping::read`], [`Mapping::write`].
    Bar1,
    /// Those of several threads: [`ParallelCopier`].
    Parallel,
    /// A block of threads on the GPU: [`PushAgent`].
    Agent,
    /// The GPU's copy engine: [`DeviceBuffer::download`], [`DeviceBuffer::upload`].
    CopyEngine,
}

impl AutoMethod {
    /// In the order in which equals are preferred.
    const ALL: [Self; 4] = [Self::Bar1, Self::Parallel, Self::Agent, Self::CopyEngine];

    /// The name that reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bar1 => "bar1",
            Self::Parallel => "parallel",
            Self::Agent => "agent",
            Self::CopyEngine => "cuda_memcpy",
        }
    }
}

impl fmt::Display for AutoMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A row of the table.
#[derive(Clone, Debug)]
struct Row {
    /// Largest size it is for.
    up_to: usize,
    measured: usize,
    method: AutoMethod,
    /// Median times in nanoseconds; those that were far behind at once have none.
    candidates: Vec<(AutoMethod, f64)>,
}

/// What an [`AutoCopier`] does with a copy, and why.
#[derive(Clone, Copy, Debug)]
pub struct AutoChoice<'a> {
    direction: CopyDirection,
    bytes: usize,
    row: &'a Row,
}

impl AutoChoice<'_> {
    /// The method it uses.
    #[must_use]
    pub fn method(&self) -> AutoMethod {
        self.row.method
    }

    /// The size in bytes that was measured for this one.
    #[must_use]
    pub fn measured(&self) -> usize {
        self.row.measured
    }

    /// What each method took: medians of single calls, in nanoseconds. A method that was far behind from the start is
    /// left out.
    #[must_use]
    pub fn candidates(&self) -> &[(AutoMethod, f64)] {
        &self.row.candidates
    }
}

impl fmt::Display for AutoChoice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { measured, method, candidates, .. } = self.row;
        write!(f, "{} of {} bytes: {method} (at {measured} bytes:", self.direction, self.bytes)?;
        for (method, ns) in candidates {
            write!(f, " {method} {ns:.0} ns")?;
        }
        f.write_str(")")
    }
}

/// Reads and writes a [`DeviceBuffer`] in whatever way is quickest for the size, on this machine.
///
/// Making one measures, on memory of its own: single calls of each method that it may use, from 64 bytes to
/// [`AutoOptions::largest`] in steps of 2. The agent and the parallel copier are used only where the options ask for them,
/// for the one takes an SM and the other cores.
///
/// # Ordering
///
/// The same for every method:
///
/// - [`read`](Self::read): every byte was fetched after the call began; it sees what this thread wrote to the buffer before,
///   through any mapping of it.
/// - [`write`](Self::write): what this thread writes later, through any mapping, is seen after these bytes.
/// - Neither waits for kernels: all methods act beside every stream but their own. Synchronise with a kernel first.
///
/// The copy engine's is a CUDA call and may wait for a lock of the driver's; the others make none, but for the launch of an
/// [agent](PushAgent) that has left.
///
/// ```
/// use gdrcopy::auto::{AutoCopier, AutoOptions};
/// use gdrcopy::policy::CopyDirection;
/// use gdrcopy::{BackendKind, Session};
///
/// let session = Session::builder().backend(BackendKind::Emulated).open()?;
/// let buffer = session.alloc(1 << 20)?;
/// let mut copier = AutoCopier::new(&session, &buffer, AutoOptions::default().largest(4096))?;
/// copier.write(100, b"bytes")?;
/// let mut back = [0; 5];
/// copier.read(100, &mut back)?;
/// assert_eq!(&back, b"bytes");
/// println!("{}", copier.explain(CopyDirection::DeviceToHost, 4096));
/// # Ok::<(), gdrcopy::Error>(())
/// ```
pub struct AutoCopier<'a> {
    tables: [Vec<Row>; 2],
    ways: Ways<'a, 'a>,
}

/// What copies.
struct Ways<'a, 'b> {
    mapping: Mapping<'b>,
    buffer: &'b DeviceBuffer,
    parallel: Option<ParallelCopier>,
    agent: Option<PushAgent<'a>>,
    /// The buffer's place among the agent's ranges.
    range: usize,
}

impl Ways<'_, '_> {
    fn has(&self, method: AutoMethod) -> bool {
        match method {
            AutoMethod::Bar1 | AutoMethod::CopyEngine => true,
            AutoMethod::Parallel => self.parallel.is_some(),
            AutoMethod::Agent => self.agent.is_some(),
        }
    }

    #[inline]
    fn read(&mut self, method: AutoMethod, offset: usize, to: &mut [u8]) -> Result<()> {
        match (method, &self.parallel, &mut self.agent) {
            (AutoMethod::Parallel, Some(copier), _) => copier.read(&self.mapping, offset, to),
            (AutoMethod::Agent, _, Some(agent)) => agent.read(self.range, offset, to),
            (AutoMethod::CopyEngine, _, _) => {
                // Writes are ordered for the GPU's kernels; its copy engine must find them arrived.
                self.mapping.flush()?;
                self.buffer.download(offset, to)
            }
            _ => self.mapping.read(offset, to),
        }
    }

    #[inline]
    fn write(&mut self, method: AutoMethod, offset: usize, from: &[u8]) -> Result<()> {
        match (method, &self.parallel, &mut self.agent) {
            (AutoMethod::Parallel, Some(copier), _) => copier.write(&self.mapping, offset, from),
            // An earlier write of the CPU's must not arrive after the GPU's.
            (AutoMethod::Agent, _, Some(agent)) => {
                self.mapping.flush()?;
                agent.write(self.range, offset, from)
            }
            (AutoMethod::CopyEngine, _, _) => {
                self.mapping.flush()?;
                self.buffer.upload(offset, from)
            }
            _ => self.mapping.write(offset, from),
        }
    }

    /// Between the start of the buffer and so much host memory.
    fn copy(&mut self, direction: CopyDirection, method: AutoMethod, host: &mut [u8]) -> Result<()> {
        match direction {
            CopyDirection::HostToDevice => self.write(method, 0, host),
            CopyDirection::DeviceToHost => self.read(method, 0, host),
        }
    }
}

impl<'a> AutoCopier<'a> {
    /// Measures, for about as long as [`AutoOptions::time`], on memory of its own.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for options out of range; what [`Session::pin`], [`PushAgent::start`] and
    /// [`ParallelCopierBuilder::build`](crate::ParallelCopierBuilder::build) return.
    pub fn new(session: &Session, buffer: &'a DeviceBuffer, options: AutoOptions) -> Result<Self> {
        options.check()?;
        let mapping = session.pin(buffer)?.map()?;
        let scratch = Arc::new(session.alloc_on(buffer.ordinal(), options.largest)?);
        let agent = options.agent.map(|agent| {
            let ranges: [DeviceRange<'a>; 2] = [DeviceRange::from(buffer), DeviceRange::from(&scratch)];
            PushAgent::start(session, ranges, agent.gpu(buffer.ordinal()))
        });
        let parallel = options.parallel.map(|copier| copier.gpu(mapping.facts().pci).build());
        let mut ways = Ways {
            mapping: session.pin(&*scratch)?.map()?,
            buffer: &scratch,
            parallel: parallel.transpose()?,
            agent: agent.transpose()?,
            range: 1,
        };
        let mut host = vec![1; options.largest];
        let h2d = measure::table(&mut ways, CopyDirection::HostToDevice, &mut host, options.time / 2)?;
        let d2h = measure::table(&mut ways, CopyDirection::DeviceToHost, &mut host, options.time / 2)?;
        let Ways { parallel, agent, .. } = ways;
        Ok(Self { tables: [h2d, d2h], ways: Ways { mapping, buffer, parallel, agent, range: 0 } })
    }

    #[inline]
    fn row(&self, direction: CopyDirection, bytes: usize) -> Option<&Row> {
        self.tables[side(direction)].iter().find(|row| bytes <= row.up_to)
    }

    #[inline]
    fn method(&self, direction: CopyDirection, bytes: usize) -> AutoMethod {
        self.row(direction, bytes).map_or(AutoMethod::Bar1, |row| row.method)
    }

    /// Reads `to.len()` bytes from byte `offset`.
    ///
    /// # Errors
    ///
    /// `OutOfBounds`, `WrongProcess`: `to` is untouched then. What the method returns otherwise.
    #[inline]
    pub fn read(&mut self, offset: usize, to: &mut [u8]) -> Result<()> {
        let method = self.method(CopyDirection::DeviceToHost, to.len());
        self.ways.read(method, offset, to)
    }

    /// Writes `from` at byte `offset`.
    ///
    /// # Errors
    ///
    /// As [`AutoCopier::read`].
    #[inline]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<()> {
        let method = self.method(CopyDirection::HostToDevice, from.len());
        self.ways.write(method, offset, from)
    }

    /// What it does with a copy of so many bytes, and why.
    #[must_use]
    pub fn explain(&self, direction: CopyDirection, bytes: usize) -> AutoChoice<'_> {
        let table = &self.tables[side(direction)];
        // The last row has no end, and 64 bytes are always measured.
        let row = self.row(direction, bytes).unwrap_or(&table[table.len() - 1]);
        AutoChoice { direction, bytes, row }
    }

    /// The mapping that it copies through, for single stores and loads in between.
    #[must_use]
    pub fn mapping(&self) -> &Mapping<'a> {
        &self.ways.mapping
    }
}

impl fmt::Debug for AutoCopier<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AutoCopier")
            .field("buffer", self.ways.buffer)
            .field("agent", &self.ways.agent)
            .field("parallel", &self.ways.parallel.is_some())
            .finish_non_exhaustive()
    }
}

fn side(direction: CopyDirection) -> usize {
    match direction {
        CopyDirection::HostToDevice => 0,
        CopyDirection::DeviceToHost => 1,
    }
}
