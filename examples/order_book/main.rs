//! Orders to a book that lives in a running kernel, and its answers, timed and checked:
//! `cargo run --release --example order_book`.
//!
//! Takes the backend that the machine has, or the one named in `GDRCOPY_BACKEND`. On `emulated`, which runs everywhere, a
//! thread plays the kernel, and the times say nothing about a GPU. The kernel is `order_book.cu`, beside this file.

#![allow(unsafe_code, reason = "launches a kernel, or starts a thread in its place")]

use std::error::Error;
use std::time::{Duration, Instant};

use gdrcopy::channel::{ChannelBuilder, Mailbox, peer};
use gdrcopy::{BackendKind, Session};

/// Side (0 buys, 1 sells), price (0 to 63), quantity, unused.
type Order = [u32; 4];
/// Quantity filled, quantity that rests, best bid plus 1, best ask plus 1; 0 where there is none.
type Answer = [u32; 4];

const ORDERS: usize = 2_000;
const TIMEOUT: Duration = Duration::from_secs(2);

/// The same book on the CPU, against which the kernel's answers are checked.
struct Book {
    levels: [[u32; 64]; 2],
}

impl Book {
    fn new() -> Self {
        Self { levels: [[0; 64]; 2] }
    }

    /// The highest bid or the lowest ask.
    fn best(&self, side: usize) -> Option<usize> {
        let mut occupied = self.levels[side].iter().enumerate().filter(|(_, quantity)| **quantity != 0);
        let found = if side == 0 { occupied.next_back() } else { occupied.next() };
        found.map(|(price, _)| price)
    }

    fn take(&mut self, &[side, price, mut left, _]: &Order) -> Answer {
        let (side, price) = (usize::from(side & 1 == 1), usize::try_from(price % 64).unwrap_or(0));
        let mut filled = 0;
        while left != 0 {
            let crosses = |offer: &usize| if side == 0 { *offer <= price } else { *offer >= price };
            let Some(offer) = self.best(1 - side).filter(crosses) else { break };
            let there = &mut self.levels[1 - side][offer];
            let traded = left.min(*there);
            *there -= traded;
            left -= traded;
            filled += traded;
        }
        self.levels[side][price] += left;
        let plus_one = |price: Option<usize>| price.and_then(|price| u32::try_from(price + 1).ok()).unwrap_or(0);
        [filled, left, plus_one(self.best(0)), plus_one(self.best(1))]
    }
}

/// Orders around a price that wanders, both sides alike.
fn orders() -> impl Iterator<Item = Order> {
    let mut state = 0x9e37_79b9_u32;
    let mut random = move |below: u32| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % below
    };
    std::iter::repeat_with(move || [random(2), 24 + random(16), 1 + random(100), 0])
}

fn trade(mailbox: &mut Mailbox<Order, Answer>) -> Result<(), Box<dyn Error>> {
    let mut book = Book::new();
    let mut times = Vec::with_capacity(ORDERS);
    let mut traded = 0_u64;
    for order in orders().take(ORDERS) {
        let started = Instant::now();
        let answer = mailbox.call(&order, TIMEOUT)?;
        times.push(started.elapsed());
        if answer != book.take(&order) {
            return Err(format!("order {order:?}: the kernel answered {answer:?}").into());
        }
        traded += u64::from(answer[0]);
    }
    times.sort_unstable();
    let at = |share: usize| times[(ORDERS - 1) * share / 1000];
    println!("{ORDERS} orders, {traded} pieces traded, every answer checked");
    println!("order to answer: median {:?}, 99 % {:?}, 99.9 % {:?}", at(500), at(990), at(999));
    Ok(())
}

#[cfg(feature = "cuda")]
fn on_gpu(mailbox: &mut Mailbox<Order, Answer>) -> Result<(), Box<dyn Error>> {
    use gdrcopy::cuda::{Module, Priority};

    // Any way of launching a kernel will do, cudarc's or the CUDA runtime's; what the kernel wants is `mailbox.device()`.
    let module = Module::load(0, include_str!("order_book.ptx"))?;
    let kernel = module.kernel(c"order_book")?;
    let stream = module.stream(Priority::High)?;
    // SAFETY: the parameter is the structure that the kernel takes; the mailbox outlives the wait for the kernel's end.
    unsafe { kernel.launch(&stream, 1, 32, &mailbox.device().to_words())? };
    let outcome = trade(mailbox);
    mailbox.stop();
    stream.finish(TIMEOUT)?;
    outcome
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &mut Mailbox<Order, Answer>) -> Result<(), Box<dyn Error>> {
    Err("kernels are launched by feature 'cuda': build with it, or set GDRCOPY_BACKEND=emulated".into())
}

fn main() -> Result<(), Box<dyn Error>> {
    let session = Session::open()?;
    let builder = ChannelBuilder::new().gpu(0).kernel_limit(Duration::from_secs(60));
    let (sender, receiver) = builder.open(&session)?;
    let mut mailbox = Mailbox::<Order, Answer>::new(sender, receiver)?;
    if session.backend() != BackendKind::Emulated {
        return on_gpu(&mut mailbox);
    }
    println!("emulated: a thread plays the kernel");
    let device = mailbox.device();
    std::thread::scope(|scope| {
        let mut book = Book::new();
        // SAFETY: the scope waits for the thread, and the mailbox outlives the scope.
        scope.spawn(move || unsafe { peer::answer(&device, |order| book.take(order)) });
        let outcome = trade(&mut mailbox);
        mailbox.stop();
        outcome
    })
}
