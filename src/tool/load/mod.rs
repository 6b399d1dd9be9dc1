//! Something for the GPU to do meanwhile, on every SM and with low priority.

use std::time::{Duration, Instant};

use clap::ValueEnum;

use self::products::{Multiplying, Products};
use self::stream::{Reader, Reading};
use super::fail::Failure;
use crate::error::Error;
use crate::session::Session;

mod product;
mod products;
mod stream;

pub use product::Product;

const PTX: &str = include_str!("../../ptx/load.ptx");
/// How long starting and stopping may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the GPU does.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Work {
    /// Matrix products, launched one behind the other as a program does it.
    #[default]
    Matmul,
    /// One kernel that reads without end and calculates a little.
    Stream,
}

impl Work {
    /// What it does, in words.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Matmul => "matrix products on every SM, 8192 x 8192, FP32, one launch behind the other, low priority",
            Self::Stream => "a kernel on every SM: FMAs on 1 GiB read again and again, low priority",
        }
    }
}

/// A GPU with kernels and memory ready.
#[derive(Debug)]
pub struct Load(Kind);

#[derive(Debug)]
enum Kind {
    Matmul(Products),
    Stream(Reader),
}

impl Load {
    /// Matrix products, the default.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn new(session: &Session, ordinal: usize) -> Result<Self, Error> {
        Self::of(session, ordinal, Work::default())
    }

    /// Loads the kernels, allocates up to 1 GiB of device memory, and runs a kernel once.
    ///
    /// Matrix products are launched by a thread that starts here and may run where this thread may run now.
    ///
    /// # Errors
    ///
    /// What CUDA reports.
    pub fn of(session: &Session, ordinal: usize, work: Work) -> Result<Self, Error> {
        Ok(Self(match work {
            Work::Matmul => Kind::Matmul(Products::new(session, ordinal)?),
            Work::Stream => Kind::Stream(Reader::new(session, ordinal)?),
        }))
    }

    /// What [`Load::new`] does, in words.
    #[must_use]
    pub fn describe() -> &'static str {
        Work::default().in_words()
    }

    /// What this one does.
    #[must_use]
    pub fn work(&self) -> Work {
        match self.0 {
            Kind::Matmul(_) => Work::Matmul,
            Kind::Stream(_) => Work::Stream,
        }
    }

    /// Starts it; returns when it runs. It ends when the returned value is dropped, or by itself after `limit`.
    ///
    /// # Errors
    ///
    /// What CUDA reports, or that it does not start.
    pub fn start(&self, limit: Duration) -> Result<Loading<'_>, Failure> {
        Ok(Loading(match &self.0 {
            Kind::Matmul(products) => Running::Matmul(products.start(limit)?),
            Kind::Stream(reader) => Running::Stream(reader.start(limit)?),
        }))
    }
}

/// A running load.
#[derive(Debug)]
pub struct Loading<'a>(Running<'a>);

#[derive(Debug)]
enum Running<'a> {
    Matmul(Multiplying<'a>),
    Stream(Reading<'a>),
}

impl Loading<'_> {
    /// Whether it still runs: figures taken beside it say nothing otherwise.
    ///
    /// # Errors
    ///
    /// It failed.
    pub fn still_runs(&self) -> Result<bool, Error> {
        match &self.0 {
            Running::Matmul(products) => products.still_runs(),
            Running::Stream(reading) => reading.still_runs(),
        }
    }

    /// The matrix product, which counts how often it is done.
    #[must_use]
    pub fn product(&self) -> Option<&Product> {
        match &self.0 {
            Running::Matmul(products) => Some(products.product()),
            Running::Stream(_) => None,
        }
    }
}

/// Waits until a load runs.
fn await_start(has_started: impl Fn() -> Result<bool, Error>) -> Result<(), Failure> {
    let begin = Instant::now();
    while !has_started()? {
        if begin.elapsed() > PATIENCE {
            let seconds = PATIENCE.as_secs();
            return Err(Failure::run(format!("the load did not start within {seconds} s; leave --load out")));
        }
        std::thread::yield_now();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::parameter_bytes;

    #[test]
    fn parameters_are_as_long_as_the_kernels() {
        for (kernel, words) in [("load", 5), ("product", 7), ("fill", 3)] {
            assert_eq!(parameter_bytes(PTX, kernel), Some(8 * words), "{kernel}");
        }
    }

    #[test]
    fn the_side_named_is_the_side_that_is_run() {
        let side = products::SIDE.to_string();
        assert!(Load::describe().contains(&format!("{side} x {side}")));
    }
}
