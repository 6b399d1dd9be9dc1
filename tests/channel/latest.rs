//! The newest value.

use std::thread;

use gdrcopy::ErrorKind;
use gdrcopy::channel::{ChannelBuilder, Latest};

use crate::kernels::{Peer, Report, peers, word_of};
use crate::{LONG, STARTS, session};

fn value<const WORDS: usize>(number: u64) -> [u32; WORDS] {
    std::array::from_fn(|n| word_of(number, u32::try_from(n).unwrap()))
}

/// Sets values as fast as it can until a reader must have seen many, then the last one.
fn race<const WORDS: usize>(peer: Peer, start: u32) {
    const LAST: u64 = 100_000;
    let session = session();
    let (sender, _receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session).unwrap();
    let mut latest = Latest::starting_at(&session, None, &value::<WORDS>(0), start).unwrap();
    let (channel, device, report) = (sender.device(), latest.device(), Report::default());
    thread::scope(|scope| {
        scope.spawn(|| peer.watch::<WORDS>(&channel, &device, LAST, &report));
        for number in 1..=LAST {
            latest.set(&value::<WORDS>(number)).unwrap();
            if number % 1000 == 0 {
                thread::yield_now();
            }
        }
    });
    let [state, seen, mixed, backward, last] = [0, 1, 2, 3, 4].map(|at| report.get(at));
    assert_eq!((state, mixed, backward, last), (2, 0, 0, LAST), "{peer:?}, {WORDS} words from {start}");
    assert!(seen > 0);
}

#[test]
fn a_reader_sees_whole_values_and_the_last_one() {
    for peer in peers() {
        for start in STARTS {
            race::<12>(peer, start);
        }
        race::<36>(peer, u32::MAX - 1000);
        race::<240>(peer, 0);
    }
}

#[test]
fn the_first_value_is_there_from_the_start() {
    for peer in peers() {
        for start in STARTS {
            let session = session();
            let (sender, _receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session).unwrap();
            let latest = Latest::starting_at(&session, None, &value::<24>(77), start).unwrap();
            let report = Report::default();
            peer.watch::<24>(&sender.device(), &latest.device(), 77, &report);
            assert_eq!([0, 1, 2, 3, 4].map(|at| report.get(at)), [2, 1, 0, 0, 77], "{peer:?} from {start}");
        }
    }
}

#[test]
fn a_length_may_be_known_at_run_time_only() {
    for peer in peers() {
        let session = session();
        let (sender, _receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session).unwrap();
        let bytes = |number| value::<24>(number).iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        let mut latest = Latest::<[u8]>::new(&session, None, &bytes(76)).unwrap();
        latest.set(&bytes(77)).unwrap();
        assert_eq!(latest.set(&[0; 95]).map_err(|error| error.kind()), Err(ErrorKind::InvalidArgument));
        let report = Report::default();
        peer.watch::<24>(&sender.device(), &latest.device(), 77, &report);
        assert_eq!([0, 1, 2, 3, 4].map(|at| report.get(at)), [2, 1, 0, 0, 77], "{peer:?}");
    }
}
