//! What is measured, and the state in which it is.

use std::time::{Duration, Instant};

use super::{CopyDirection, CopyMethod};
use crate::copy::{ParallelCopier, largest_alone};
use crate::error::{Error, ErrorKind, Result};

/// The least that the largest size can be: a table that ends below a line says nothing about what is above.
const LEAST_LARGEST: usize = 64;
/// How long a block waits for workers to fall asleep.
const PATIENCE: Duration = Duration::from_millis(1);
/// How long a burst has gone on when its copies are timed: by then those workers are awake that such copies wake.
const WARM_UP: Duration = Duration::from_micros(100);
const WARM_UP_CALLS: usize = 6;

/// What is measured: ways of copying between the start of some device memory and host memory.
pub(crate) trait Subject {
    /// The ways there are for copies of so many bytes.
    fn methods(&self, direction: CopyDirection, bytes: usize) -> Vec<CopyMethod>;

    /// How long a block of copies takes, [timed](Block::time) when everything is ready for it. Afterwards nothing of it is
    /// under way.
    fn block(&mut self, method: CopyMethod, direction: CopyDirection, bytes: usize, block: Block) -> Result<Duration>;
}

/// Copies that are timed together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(super) calls: u32,
}

impl Block {
    /// Makes the calls back to back. Where there are several, another one comes first, untimed, so that all of them find
    /// caches and buffers as they leave them themselves.
    #[inline]
    pub(crate) fn time(self, mut copy: impl FnMut() -> Result<()>) -> Result<Duration> {
        if self.calls > 1 {
            copy()?;
        }
        let begun = Instant::now();
        for _ in 0..self.calls {
            copy()?;
        }
        Ok(begun.elapsed())
    }
}

/// Makes copies as a program does that begins a burst of them: those workers are awake then that such copies wake, and no
/// others, which would look on.
pub(crate) fn warm_up(mut copy: impl FnMut() -> Result<()>) -> Result<()> {
    let started = Instant::now();
    for call in 0..WARM_UP_CALLS {
        copy()?;
        let so_far = started.elapsed();
        if so_far >= WARM_UP {
            break;
        }
        if call == 1 {
            // The second of a burst has woken them, which takes some time.
            wait_until(|| started.elapsed() >= so_far + WARM_UP / 4);
        }
    }
    Ok(())
}

/// Waits until the workers sleep: those of another copier are on the same CPUs.
pub(crate) fn rest(copier: &ParallelCopier) {
    wait_until(|| copier.awake() == 0);
}

fn wait_until(is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() && started.elapsed() < PATIENCE {
        std::hint::spin_loop();
    }
}

/// Whether a parallel copier shares such a copy. Where it does not, it is no other way than one core.
pub(crate) fn are_shared(direction: CopyDirection, bytes: usize) -> bool {
    bytes > largest_alone(direction)
}

/// The sizes that are measured: from 1 byte in steps of 2.
pub(crate) fn sizes(op: &'static str, largest: usize) -> Result<Vec<usize>> {
    if largest < LEAST_LARGEST {
        let cause = format!("the largest size to measure is {largest} bytes, of at least {LEAST_LARGEST}");
        return Err(Error::new(op, ErrorKind::InvalidArgument, cause).remedy("ask for a larger size"));
    }
    let doubled = std::iter::successors(Some(1_usize), |size| size.checked_mul(2));
    Ok(doubled.take_while(|&size| size <= largest).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackendKind;
    use crate::session::Session;
    use CopyDirection::{DeviceToHost, HostToDevice};

    const MS: Duration = Duration::from_millis(1);

    /// A copy of which a parallel copier documents that it makes it alone wakes nobody, and the next larger one does.
    #[test]
    fn a_parallel_copier_shares_what_it_is_said_to_share() {
        let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().unwrap();
        let buffer = session.alloc(64 << 10).unwrap();
        let mapping = session.pin(&buffer).unwrap().map().unwrap();
        let spin = 100 * MS;
        let copier = ParallelCopier::builder().spin(spin).threads(2).write_threads(2).build();
        // Too few CPUs.
        let Ok(copier) = copier else { return };
        let carry = |direction, host: &mut [u8]| match direction {
            HostToDevice => copier.write(&mapping, 0, host).unwrap(),
            DeviceToHost => copier.read(&mapping, 0, host).unwrap(),
        };
        let mut host = vec![0; 64 << 10];
        wait_for(|| copier.awake() == 0);
        for direction in CopyDirection::ALL {
            let alone = largest_alone(direction);
            assert!(!are_shared(direction, alone) && are_shared(direction, alone + 1));
            (0..10).for_each(|_| carry(direction, &mut host[..alone]));
            std::thread::sleep(5 * MS);
            assert_eq!(copier.awake(), 0, "{direction}: {alone} bytes");
            wait_for(|| {
                carry(direction, &mut host[..alone + 1]);
                copier.awake() > 0
            });
            wait_for(|| copier.awake() == 0);
        }
    }

    fn wait_for(mut is_so: impl FnMut() -> bool) {
        let started = Instant::now();
        while !is_so() {
            assert!(started.elapsed() < Duration::from_secs(20), "not within 20 s");
            std::thread::yield_now();
        }
    }

    #[test]
    fn too_small_a_largest_size_is_refused() {
        let error = sizes("calibrate", 63).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("63 bytes, of at least 64"), "{error}");
    }
}
