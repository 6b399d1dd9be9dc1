//! Measuring the candidates.

#![allow(unsafe_code, reason = "routines are run on the mapping's own window, one after the other")]

use std::time::{Duration, Instant};

use super::choose::{self, Cell};
use super::{CopyDirection, CopyMethod, MeasuredOn, Policy};
use crate::backend::MappingType;
use crate::copy::{self, ParallelCopier, ParallelCopierBuilder, Routine, fence};
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::session::Session;
use crate::sys::date;

/// A block of calls takes about this long, so that reading the clock costs nothing.
const BLOCK: Duration = Duration::from_micros(100);
const MAX_CALLS: u32 = 1000;
/// Blocks of each candidate, at each size.
const MIN_ROUNDS: usize = 5;
const MAX_ROUNDS: usize = 51;
/// How long a block waits for workers to wake up.
const PATIENCE: Duration = Duration::from_millis(1);
const SMALLEST: usize = 64;

/// What is measured by [`Session::calibrate`], and for how long.
///
/// The calling thread measures, so keep it on a CPU near the GPU first.
#[derive(Clone, Debug)]
pub struct Calibration {
    gpu: usize,
    time: Duration,
    largest: usize,
    threads: Vec<usize>,
    copier: ParallelCopierBuilder,
}

/// How far a calibration has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Cells of the table that are done.
    pub done: usize,
    /// Cells in all.
    pub of: usize,
    /// The one that comes next.
    pub direction: CopyDirection,
    /// Its size in bytes.
    pub bytes: usize,
}

impl Default for Calibration {
    fn default() -> Self {
        Self {
            gpu: 0,
            time: Duration::from_secs(5),
            largest: 4 << 20,
            threads: vec![2, 3, 4, 8],
            copier: ParallelCopier::builder(),
        }
    }
}

impl Calibration {
    /// Every routine this processor has, parallel copies with 2, 3, 4 and 8 threads as far as there are CPUs, and
    /// `cuMemcpy`; 64 bytes to 4 MiB in steps of 2; on GPU 0; in 5 s or so.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Measures on the GPU with this ordinal.
    #[must_use]
    pub fn gpu(mut self, ordinal: usize) -> Self {
        self.gpu = ordinal;
        self
    }

    /// About how long it may take. Five rounds are made at each size in any case, which is some seconds for large ones.
    #[must_use]
    pub fn time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    /// Measures sizes up to this one, in bytes.
    #[must_use]
    pub fn largest(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }

    /// Measures parallel copies of these numbers of threads; none at all where the list is empty. Numbers for which there
    /// are not enough CPUs are left out.
    #[must_use]
    pub fn threads(mut self, threads: impl IntoIterator<Item = usize>) -> Self {
        self.threads = threads.into_iter().filter(|&threads| threads > 1).collect();
        self
    }

    /// Places the workers of parallel copies as this builder says; its numbers of threads do not count.
    #[must_use]
    pub fn copier(mut self, copier: ParallelCopierBuilder) -> Self {
        self.copier = copier;
        self
    }

    /// See [`Session::calibrate`].
    pub(crate) fn run(&self, session: &Session, mut progress: impl FnMut(Progress)) -> Result<Policy> {
        if self.largest < SMALLEST {
            let cause = format!("nothing is measured below {SMALLEST} bytes, and the largest size is {}", self.largest);
            return Err(Error::new("calibrate", ErrorKind::InvalidArgument, cause).remedy("ask for a larger size"));
        }
        let buffer = session.alloc_on(self.gpu, self.largest)?;
        let pinned = session.pin(&buffer)?;
        let mapping = pinned.map()?;
        let copiers = self.copiers(&mapping)?;
        #[cfg(feature = "cuda")]
        let mut rival = super::rival::CudaMemcpy::new(session, &buffer)?;

        let sizes: Vec<_> = std::iter::successors(Some(SMALLEST), |size| size.checked_mul(2))
            .take_while(|&size| size <= self.largest)
            .collect();
        let of = 2 * sizes.len();
        let each = self.time / u32::try_from(of).unwrap_or(u32::MAX);
        let mut host = vec![1; self.largest];
        let mut tables = [Vec::new(), Vec::new()];
        for (table, direction) in tables.iter_mut().zip(CopyDirection::ALL) {
            let mut cells = Vec::new();
            for &bytes in &sizes {
                progress(Progress { done: table_done(direction, sizes.len()) + cells.len(), of, direction, bytes });
                let mut arms: Vec<Box<dyn Arm + '_>> = Vec::new();
                for routine in routines(&mapping, direction) {
                    arms.push(Box::new(OneCore { mapping: &mapping, routine }));
                }
                for copier in &copiers {
                    arms.push(Box::new(Together { mapping: &mapping, copier }));
                }
                #[cfg(feature = "cuda")]
                if let Some(rival) = &mut rival {
                    arms.push(Box::new(rival));
                }
                cells.push(cell(&mapping, arms, direction, &mut host[..bytes], each)?);
            }
            *table = choose::rows(cells);
        }
        let [h2d, d2h] = tables;
        Policy::new("measured now".to_owned(), measured_on(session, self.gpu, &mapping)?, h2d, d2h)
    }

    /// One for each number of threads there are CPUs for.
    fn copiers(&self, mapping: &Mapping<'_>) -> Result<Vec<ParallelCopier>> {
        let near = self.copier.clone().gpu(mapping.facts().pci);
        let mut copiers = Vec::new();
        for &threads in &self.threads {
            match near.clone().threads(threads).write_threads(threads).build() {
                Ok(copier) => copiers.push(copier),
                // Too few CPUs.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                Err(error) => return Err(error),
            }
        }
        Ok(copiers)
    }
}

fn table_done(direction: CopyDirection, sizes: usize) -> usize {
    match direction {
        CopyDirection::HostToDevice => 0,
        CopyDirection::DeviceToHost => sizes,
    }
}

fn measured_on(session: &Session, ordinal: usize, mapping: &Mapping<'_>) -> Result<MeasuredOn> {
    let here = MeasuredOn::here(session.backend());
    let gpus = session.gpus()?;
    let here = gpus.iter().find(|gpu| gpu.ordinal == ordinal).map_or(here.clone(), |gpu| here.on(gpu));
    Ok(MeasuredOn { mapping: Some(mapping.mapping_type().to_string()), date: date::now(), ..here })
}

/// The routines that are candidates. Not `scalar` beside others, whose loads are a round trip for each 8 bytes; and not
/// `movdir64b` for loads, which are those of the routine it is built on.
fn routines(mapping: &Mapping<'_>, direction: CopyDirection) -> Vec<&'static Routine> {
    if mapping.mapping_type() == MappingType::Device {
        return vec![copy::scalar_routine()];
    }
    let others = |routine: &&Routine| match routine.name() {
        "scalar" => false,
        "movdir64b" => direction == CopyDirection::HostToDevice,
        _ => true,
    };
    let usable = copy::routines().iter().copied().filter(|routine| routine.is_available()).filter(others);
    let usable: Vec<_> = usable.collect();
    if usable.is_empty() { vec![copy::scalar_routine()] } else { usable }
}

/// A candidate.
pub(super) trait Arm {
    fn method(&self) -> CopyMethod;

    /// Makes ready for a block of calls.
    fn prepare(&mut self) {}

    /// Copies between the start of the device memory and so much host memory, with the fences of a plain copy.
    fn copy(&mut self, direction: CopyDirection, host: &mut [u8]) -> Result<()>;
}

/// The calling thread with a routine of its own choice.
struct OneCore<'a> {
    mapping: &'a Mapping<'a>,
    routine: &'static Routine,
}

impl Arm for OneCore<'_> {
    fn method(&self) -> CopyMethod {
        CopyMethod::Routine(self.routine.name())
    }

    #[inline]
    fn copy(&mut self, direction: CopyDirection, host: &mut [u8]) -> Result<()> {
        let device = self.mapping.at("calibrate", 0, host.len())?;
        match direction {
            CopyDirection::HostToDevice => {
                // SAFETY: `at` proved that the bytes lie in the live window; host memory does not overlap it.
                unsafe { self.routine.store(device, host) };
                fence::store();
            }
            CopyDirection::DeviceToHost => {
                fence::full();
                // SAFETY: as above, and the window is whole pages and so whole lines.
                unsafe { self.routine.load(host, device) };
                fence::load();
            }
        }
        Ok(())
    }
}

/// Several threads.
struct Together<'a> {
    mapping: &'a Mapping<'a>,
    copier: &'a ParallelCopier,
}

impl Arm for Together<'_> {
    fn method(&self) -> CopyMethod {
        CopyMethod::Parallel(self.copier.threads())
    }

    fn prepare(&mut self) {
        let started = Instant::now();
        self.copier.wake();
        while self.copier.awake() + 1 < self.copier.threads() && started.elapsed() < PATIENCE {
            std::hint::spin_loop();
        }
    }

    #[inline]
    fn copy(&mut self, direction: CopyDirection, host: &mut [u8]) -> Result<()> {
        match direction {
            CopyDirection::HostToDevice => self.copier.write(self.mapping, 0, host),
            CopyDirection::DeviceToHost => self.copier.read(self.mapping, 0, host),
        }
    }
}

/// Blocks of all candidates in turn, beginning with another one in each round, so that whatever changes meanwhile changes
/// for all of them; and of each the median.
fn cell(
    mapping: &Mapping<'_>,
    mut arms: Vec<Box<dyn Arm + '_>>,
    direction: CopyDirection,
    host: &mut [u8],
    time: Duration,
) -> Result<Cell> {
    let started = Instant::now();
    let mut calls = vec![1; arms.len()];
    let mut samples = vec![Vec::with_capacity(MAX_ROUNDS); arms.len()];
    let mut rounds = 0;
    while rounds < MIN_ROUNDS || (rounds < MAX_ROUNDS && started.elapsed() < time) {
        for n in 0..arms.len() {
            let at = (n + rounds) % arms.len();
            let arm = &mut arms[at];
            arm.prepare();
            if rounds == 0 {
                calls[at] = calls_in_a_block(arm.as_mut(), direction, host)?;
            }
            // Untimed, so that each finds caches and workers as it leaves them itself.
            arm.copy(direction, host)?;
            let begun = Instant::now();
            for _ in 0..calls[at] {
                arm.copy(direction, host)?;
            }
            samples[at].push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(calls[at]));
            mapping.flush()?;
        }
        rounds += 1;
    }
    let medians = samples.into_iter().map(median);
    let candidates = arms.iter().map(|arm| arm.method()).zip(medians).collect();
    Ok(Cell { bytes: host.len(), candidates })
}

fn calls_in_a_block(arm: &mut (dyn Arm + '_), direction: CopyDirection, host: &mut [u8]) -> Result<u32> {
    arm.copy(direction, host)?;
    let begun = Instant::now();
    arm.copy(direction, host)?;
    let calls = BLOCK.as_nanos() / begun.elapsed().as_nanos().max(1);
    Ok(u32::try_from(calls).unwrap_or(MAX_CALLS).clamp(1, MAX_CALLS))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    match samples.len() {
        0 => f64::INFINITY,
        n if n % 2 == 1 => samples[middle],
        _ => f64::midpoint(samples[middle - 1], samples[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
