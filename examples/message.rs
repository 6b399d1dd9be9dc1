//! A message into GPU memory and an answer out of it, timed: `cargo run --release --example message`.
//!
//! Takes the backend that the machine has, or the one named in `GDRCOPY_BACKEND` (`emulated` runs everywhere).

use std::time::Instant;

use gdrcopy::{Result, Session};

const MESSAGE: usize = 64;
const FLAG: usize = 0;
const ANSWER: usize = 128;
const ROUNDS: u32 = 1000;

fn main() -> Result<()> {
    let session = Session::open()?;
    let buffer = session.alloc(4096)?;
    let mapping = session.pin(&buffer)?.map()?;
    println!("{session:?}\n{:?}", mapping.facts());

    let started = Instant::now();
    for round in 1..=ROUNDS {
        // A kernel that loads the flag with acquire semantics sees the message.
        mapping.publish(MESSAGE, b"a message of some bytes", FLAG, round)?;
    }
    println!("publish {:?} each", started.elapsed() / ROUNDS);

    let mut answer = [0; 32];
    let started = Instant::now();
    for _ in 0..ROUNDS {
        mapping.read(ANSWER, &mut answer)?;
    }
    println!("read    {:?} each", started.elapsed() / ROUNDS);

    // What arrived, as the GPU's own copy engine sees it.
    mapping.flush()?;
    let mut seen = [0; 23];
    buffer.download(MESSAGE, &mut seen)?;
    assert_eq!(&seen, b"a message of some bytes");
    drop(mapping);
    buffer.free()?;
    session.close()?;
    Ok(())
}
