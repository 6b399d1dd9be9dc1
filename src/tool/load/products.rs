//! Matrix products without a pause: a thread keeps a few of them launched ahead.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::product::Product;
use super::{PATIENCE, await_start};
use crate::error::{Error, ErrorKind};
use crate::session::Session;
use crate::tool::fail::Failure;

/// Rows and columns: a product takes tens of milliseconds, and what it reads is more than any cache holds.
pub(super) const SIDE: usize = 8192;
/// Products launched and not finished: one that runs, and as many behind it as make up for a thread that comes late.
const AHEAD: u64 = 3;
/// Between two looks at how far the GPU is.
const NAP: Duration = Duration::from_millis(1);

/// The product and the thread that launches it.
#[derive(Debug)]
pub(super) struct Products {
    shared: Arc<Shared>,
    /// Gone when the thread is to end.
    orders: Option<Sender<Duration>>,
    outcomes: Receiver<Result<(), Error>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    product: Product,
    stop: AtomicBool,
}

impl Products {
    pub(super) fn new(session: &Session, ordinal: usize) -> Result<Self, Error> {
        let product = Product::new(session, ordinal, SIDE)?;
        let shared = Arc::new(Shared { product, stop: AtomicBool::new(false) });
        let (orders, taken) = channel();
        let (told, outcomes) = channel();
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name("load".to_owned()).spawn(move || {
            for limit in taken {
                if told.send(own.multiply(limit)).is_err() {
                    return;
                }
            }
        });
        let thread = thread.map_err(|error| {
            Error::new("load", ErrorKind::OutOfMemory, format!("no thread that launches the load: {error}"))
        })?;
        Ok(Self { shared, orders: Some(orders), outcomes, thread: Some(thread) })
    }

    pub(super) fn start(&self, limit: Duration) -> Result<Multiplying<'_>, Failure> {
        let shared = &*self.shared;
        let before = shared.product.started();
        shared.stop.store(false, Ordering::Release);
        let gone = || Failure::run("the thread that launches the load has ended");
        self.orders.as_ref().ok_or_else(gone)?.send(limit).map_err(|_| gone())?;
        let multiplying = Multiplying { products: self, outcome: RefCell::default() };
        await_start(|| Ok(!multiplying.still_runs()? || shared.product.started() > before))?;
        Ok(multiplying)
    }
}

impl Shared {
    /// Launches one product behind the other until told to stop, and waits for the last.
    fn multiply(&self, limit: Duration) -> Result<(), Error> {
        let product = &self.product;
        let stream = product.stream()?;
        let begin = Instant::now();
        let mut launched = product.finished();
        while !self.stop.load(Ordering::Acquire) && begin.elapsed() < limit {
            if launched - product.finished() < AHEAD {
                product.launch(&stream, launched)?;
                launched += 1;
                continue;
            }
            thread::sleep(NAP);
            // A kernel that failed finishes no product.
            if stream.is_idle()? && product.finished() < launched {
                return Err(Error::new("run kernel", ErrorKind::Io(libc::EIO), "a matrix product was not finished"));
            }
        }
        stream.finish(PATIENCE)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Products are done one after the other.
#[derive(Debug)]
pub(super) struct Multiplying<'a> {
    products: &'a Products,
    /// Once it is known.
    outcome: RefCell<Option<Result<(), Error>>>,
}

impl Multiplying<'_> {
    pub(super) fn product(&self) -> &Product {
        &self.products.shared.product
    }

    pub(super) fn still_runs(&self) -> Result<bool, Error> {
        let mut outcome = self.outcome.borrow_mut();
        if outcome.is_none() {
            *outcome = self.products.outcomes.try_recv().ok();
        }
        match &*outcome {
            None => Ok(true),
            Some(Ok(())) => Ok(false),
            Some(Err(error)) => Err(error.clone()),
        }
    }
}

impl Drop for Multiplying<'_> {
    fn drop(&mut self) {
        self.products.shared.stop.store(true, Ordering::Release);
        if self.outcome.get_mut().is_none() {
            // The products that were launched are done first; the thread itself gives up after a time.
            let _ = self.products.outcomes.recv_timeout(2 * PATIENCE);
        }
    }
}
