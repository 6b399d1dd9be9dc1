//! A matrix product that the GPU does by a kernel of this tree.

#![allow(unsafe_code, reason = "launches kernels on memory allocated here")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{PATIENCE, PTX};
use crate::backend::Allocator;
use crate::buffer::DeviceBuffer;
use crate::cuda::{Module, PinnedHost, Priority, Stream};
use crate::error::{Error, ErrorKind};
use crate::session::Session;
use crate::sys::num::u64_of;

/// Rows and columns that a block computes, and its threads.
const TILE: usize = 128;
const THREADS: u32 = 256;
const FLOAT: usize = size_of::<f32>();
/// What the kernel reports, in host memory.
const STARTED: usize = 0;
const FINISHED: usize = 8;
const TIMES: usize = 64;
const LOG: u64 = 1024;

/// Square matrices A, B and C in GPU memory, and the kernel for C = A x B.
#[derive(Debug)]
pub struct Product {
    module: Module,
    /// A, B and C, and then the word in which the kernel's blocks count themselves.
    memory: DeviceBuffer,
    report: PinnedHost,
    side: usize,
}

impl Product {
    /// Matrices of `side` rows and columns, with numbers from -1 to 1 in A and B. The product is done once, so that nothing
    /// is left to be loaded.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` unless `side` is a multiple of 128 from 128 to 32768; what CUDA reports.
    pub fn new(session: &Session, ordinal: usize, side: usize) -> Result<Self, Error> {
        if !side.is_multiple_of(TILE) || !(TILE..=1 << 15).contains(&side) {
            let cause = format!("a matrix of {side} rows");
            return Err(Error::new("load", ErrorKind::InvalidArgument, cause)
                .remedy("ask for a multiple of 128 from 128 to 32768"));
        }
        let module = Module::load(ordinal, PTX)?;
        let matrix = side * side * FLOAT;
        let memory = session.alloc_as(ordinal, 3 * matrix + 64, Allocator::CuMemAlloc)?;
        memory.upload(3 * matrix, &[0; 64])?;
        let bytes = TIMES + 8 * usize::try_from(LOG).unwrap_or(0);
        let product = Self { module, memory, report: PinnedHost::new(ordinal, bytes)?, side };
        product.fill()?;
        product.once()?;
        Ok(product)
    }

    /// A and B, with the same numbers every time.
    fn fill(&self) -> Result<(), Error> {
        let stream = self.stream()?;
        let fill = self.module.kernel(c"fill")?;
        let blocks = fill.resident_blocks(THREADS)?.max(1);
        let words = [self.at(0), u64_of(2 * self.side * self.side), 1];
        // SAFETY: the parameter's layout is held to the kernel's by a test; A and B, one behind the other, have as many
        // numbers; freeing them waits for the kernel.
        unsafe { fill.launch(&stream, blocks, THREADS, &words)? };
        stream.finish(PATIENCE)
    }

    /// Rows, and columns, of each matrix.
    #[must_use]
    pub fn side(&self) -> usize {
        self.side
    }

    /// A, B and C as they are in the GPU's memory, row by row.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn matrices(&self) -> Result<[Vec<f32>; 3], Error> {
        let read = |matrix: usize| -> Result<Vec<f32>, Error> {
            let mut bytes = vec![0; self.matrix_bytes()];
            self.memory.download(matrix * bytes.len(), &mut bytes)?;
            Ok(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect())
        };
        Ok([read(0)?, read(1)?, read(2)?])
    }

    fn matrix_bytes(&self) -> usize {
        self.side * self.side * FLOAT
    }

    /// The address of a matrix, or of what follows the last.
    fn at(&self, matrix: usize) -> u64 {
        self.memory.addr().raw() + u64_of(matrix * self.matrix_bytes())
    }

    /// One that lets others go first.
    pub(super) fn stream(&self) -> Result<Stream<'_>, Error> {
        self.module.stream(Priority::Low)
    }

    /// Launches product `number`; products on one stream have ascending numbers.
    pub(super) fn launch(&self, stream: &Stream<'_>, number: u64) -> Result<(), Error> {
        let tiles = self.side / TILE;
        let blocks = u32::try_from(tiles * tiles).unwrap_or(u32::MAX);
        let report = self.report.gpu_addr()?.raw();
        let words = [self.at(0), self.at(1), self.at(2), u64_of(self.side), self.at(3), number, report];
        let kernel = self.module.kernel(c"product")?;
        // SAFETY: the parameter's layout is held to the kernel's by a test; the memory holds three matrices and the word
        // behind them; freeing it waits for the kernel.
        unsafe { kernel.launch(stream, blocks, THREADS, &words) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: `offset` is a multiple of 8 inside the memory, which starts on a page; the GPU writes it with single
        // accesses, and nobody makes a slice of it.
        unsafe { AtomicU64::from_ptr(self.report.as_ptr().wrapping_add(offset).cast()) }
    }

    /// How many were started so far.
    #[must_use]
    pub fn started(&self) -> u64 {
        self.word(STARTED).load(Ordering::Acquire)
    }

    /// How many are finished.
    #[must_use]
    pub fn finished(&self) -> u64 {
        self.word(FINISHED).load(Ordering::Acquire)
    }

    /// When a product was finished, by the GPU's own clock: the first is number 0, and the last 1024 are known.
    #[must_use]
    pub fn finished_at(&self, number: u64) -> Option<Duration> {
        let is_known = || (self.finished().saturating_sub(LOG)..self.finished()).contains(&number);
        let slot = usize::try_from(number % LOG).unwrap_or(0);
        let time = is_known().then(|| self.word(TIMES + 8 * slot).load(Ordering::Acquire));
        // It may have been written over meanwhile.
        time.filter(|_| is_known()).map(Duration::from_nanos)
    }

    /// Does it once more and waits for that.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn once(&self) -> Result<(), Error> {
        let stream = self.stream()?;
        self.launch(&stream, self.finished())?;
        stream.finish(PATIENCE)
    }
}
