//! How many copies are made, and how.

use std::time::Duration;

use crate::tool::fail::Failure;
use crate::tool::measure::Amount;
use crate::tool::report::Direction;

/// Copies per loop where neither a count nor the time says otherwise.
const DEFAULT_WRITES: u64 = 100_000;
/// As [`DEFAULT_WRITES`].
const DEFAULT_READS: u64 = 10_000;

/// What a row is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loops {
    /// Back to back, then one at a time.
    All,
    /// Back to back only.
    Sustained,
    /// One at a time only, each after the host's lines were flushed from the caches.
    Cold,
    /// One at a time only, and no longer than the time allows, whatever count was asked for.
    Single,
}

/// How many copies are made, and how.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Exactly so many writes; 0 for none.
    pub writes: Option<u64>,
    /// Exactly so many reads; 0 for none.
    pub reads: Option<u64>,
    /// Which loops.
    pub loops: Loops,
    /// Compare the bytes afterwards.
    pub verify: bool,
    /// The largest copy.
    pub largest: usize,
}

impl Terms {
    /// Refuses what leaves nothing to measure.
    ///
    /// # Errors
    ///
    /// Both counts are 0.
    pub fn check(&self) -> Result<(), Failure> {
        if self.directions().next().is_none() {
            return Err(Failure::usage("-w 0 and -r 0 leave nothing to measure; give one of them a count"));
        }
        Ok(())
    }

    /// The directions to measure: a count of 0 leaves one out.
    pub fn directions(&self) -> impl Iterator<Item = Direction> + use<> {
        let (writes, reads) = (self.writes != Some(0), self.reads != Some(0));
        [(Direction::HostToDevice, writes), (Direction::DeviceToHost, reads)]
            .into_iter()
            .filter_map(|(direction, wanted)| wanted.then_some(direction))
    }

    /// How many copies to make in one of a row's loops, which may take `time`.
    #[must_use]
    pub fn amount(&self, direction: Direction, time: Duration) -> Amount {
        let (exact, usual) = match direction {
            Direction::HostToDevice => (self.writes, DEFAULT_WRITES),
            Direction::DeviceToHost => (self.reads, DEFAULT_READS),
        };
        exact.map_or(Amount::UpTo(usual, time), Amount::Exactly)
    }

    /// What a row is made of, in words; it may take `row`.
    #[must_use]
    pub fn in_words(&self, row: Duration) -> String {
        let mut is_timed = false;
        let counts = self.directions().map(|direction| {
            let what = match direction {
                Direction::HostToDevice => "writes",
                Direction::DeviceToHost => "reads",
            };
            match self.amount(direction, row) {
                Amount::Exactly(n) => format!("exactly {n} {what}"),
                Amount::UpTo(n, _) => {
                    is_timed = true;
                    format!("up to {n} {what}")
                }
            }
        });
        let counts = counts.collect::<Vec<_>>().join(" or ");
        let limit = if is_timed { format!(" in {} (20 at least)", time_in_words(row)) } else { String::new() };
        let verified = if self.verify { "data compared" } else { "data NOT compared" };
        format!("{counts}{limit}; {verified}")
    }
}

fn time_in_words(time: Duration) -> String {
    match time.as_micros() {
        us if us < 10_000 => format!("{us} us"),
        _ => format!("{} ms", time.as_millis()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { writes: None, reads: None, loops: Loops::All, verify: true, largest: 100 };

    #[test]
    fn the_terms_in_words() {
        let row = Duration::from_millis(150);
        let terms = TERMS;
        assert_eq!(
            terms.in_words(row),
            "up to 100000 writes or up to 10000 reads in 150 ms (20 at least); data compared"
        );
        assert!(terms.in_words(row / 200).contains("in 750 us (20 at least)"));
        let exact = Terms { writes: Some(5), reads: Some(6), verify: false, ..TERMS };
        assert_eq!(exact.in_words(row), "exactly 5 writes or exactly 6 reads; data NOT compared");
        let one = Terms { writes: Some(5), reads: Some(0), ..TERMS };
        assert!(one.in_words(row).starts_with("exactly 5 writes; "));
        let mixed = Terms { writes: Some(5), reads: None, ..TERMS };
        assert!(mixed.in_words(row).starts_with("exactly 5 writes or up to 10000 reads in 150 ms"));
    }
}
