//! Questions with a deadline.

use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::ErrorKind;
use gdrcopy::channel::{ChannelBuilder, ChannelError, Mailbox};

use crate::kernels::{Peer, peers};
use crate::{LONG, STARTS, session};

/// Eleven lines.
type Big = [u32; 132];

/// What `answer` makes of a request.
fn answer_to(request: &Big) -> u32 {
    request[0] ^ request[131]
}

fn mailbox<Req, Resp>(builder: ChannelBuilder) -> Mailbox<Req, Resp>
where
    Req: zerocopy::IntoBytes + zerocopy::Immutable,
    Resp: zerocopy::FromBytes + zerocopy::IntoBytes,
{
    let (sender, receiver) = builder.kernel_limit(LONG).open(&session()).unwrap();
    Mailbox::new(sender, receiver).unwrap()
}

#[test]
fn every_call_gets_its_own_answer() {
    for peer in peers() {
        for start in STARTS {
            let small = ChannelBuilder::new().lines_to_gpu(32).lines_to_host(32).first_lines(start, start);
            let mut mailbox = mailbox::<Big, u32>(small);
            assert_eq!((mailbox.request_lines(), mailbox.response_lines()), (11, 1));
            let device = mailbox.device();
            thread::scope(|scope| {
                scope.spawn(|| peer.answer(&device, 11, 1, 0));
                for n in 1..1000 {
                    let request: Big = std::array::from_fn(|at| n * 1000 + u32::try_from(at).unwrap());
                    assert_eq!(mailbox.call(&request, LONG).unwrap(), answer_to(&request), "{peer:?} {n}");
                }
                mailbox.stop();
            });
            let started = Instant::now();
            assert!(matches!(mailbox.call(&[0; 132], LONG), Err(ChannelError::KernelGone)));
            assert!(started.elapsed() < LONG);
        }
    }
}

fn echoes(peer: Peer, calls: u32, timeout: Duration, delay_ns: u64) -> (u32, u32) {
    let mut mailbox = mailbox::<[u32; 12], [u32; 12]>(ChannelBuilder::new().lines_to_gpu(32).lines_to_host(32));
    let device = mailbox.device();
    let (mut answered, mut timed_out) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| peer.answer(&device, 1, 1, delay_ns));
        for n in 0..calls {
            let request: [u32; 12] = std::array::from_fn(|at| if at < 6 { n + 1 } else { 0 });
            match mailbox.call(&request, if n % 2 == 0 { timeout } else { LONG }) {
                Ok(answer) => {
                    assert_eq!(answer, [n + 1; 12], "{peer:?}: the answer to another call");
                    answered += 1;
                }
                Err(ChannelError::TimedOut) => timed_out += 1,
                Err(error) => panic!("{error}"),
            }
        }
        mailbox.stop();
    });
    (answered, timed_out)
}

#[test]
fn a_late_answer_is_nobody_elses() {
    for peer in peers() {
        let (answered, timed_out) = echoes(peer, 200, Duration::from_micros(50), 1_000_000);
        assert_eq!(answered + timed_out, 200);
        assert!(answered >= 100 && timed_out > 50, "{peer:?}: {answered} answered, {timed_out} timed out");
    }
}

#[test]
fn without_a_kernel_a_call_times_out_also_when_the_ring_is_full() {
    let mut mailbox = mailbox::<[u8; 48], u8>(ChannelBuilder::new().lines_to_gpu(32));
    for call in 0..40 {
        let started = Instant::now();
        let timeout = Duration::from_millis(2);
        assert!(matches!(mailbox.call(&[0; 48], timeout), Err(ChannelError::TimedOut)));
        assert!(started.elapsed() >= timeout, "call {call}");
    }
    // What found no room was not sent.
    assert_eq!(mailbox.late_answers(), 32);
}

#[test]
fn ends_that_do_not_belong_together_are_refused() {
    let session = session();
    let open = |builder: ChannelBuilder| builder.open(&session).unwrap();
    let (sender, _) = open(ChannelBuilder::new());
    let (_, receiver) = open(ChannelBuilder::new());
    let kind = |error: gdrcopy::Error| error.kind();
    assert_eq!(Mailbox::<u8, u8>::new(sender, receiver).map_err(kind).unwrap_err(), ErrorKind::InvalidArgument);
    let (sender, receiver) = open(ChannelBuilder::new().readers(2));
    assert_eq!(Mailbox::<u8, u8>::new(sender, receiver).map_err(kind).unwrap_err(), ErrorKind::InvalidArgument);
    let (sender, receiver) = open(ChannelBuilder::new().lines_to_gpu(32));
    let long = Mailbox::<[u8; 16 * 48 + 1], u8>::new(sender, receiver);
    assert_eq!(long.map_err(kind).unwrap_err(), ErrorKind::OutOfBounds);
    let (sender, receiver) = open(ChannelBuilder::new().lines_to_gpu(32));
    assert!(Mailbox::<[u8; 16 * 48], u8>::new(sender, receiver).is_ok());
}

#[test]
fn lengths_may_be_known_at_run_time_only() {
    for peer in peers() {
        let (sender, receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session()).unwrap();
        let control = sender.control();
        let mut mailbox = Mailbox::<[u8], [u8]>::with_sizes(sender, receiver, 11 * 48, 4).unwrap();
        let device = mailbox.device();
        thread::scope(|scope| {
            scope.spawn(|| peer.answer(&device, 11, 1, 0));
            let mut request = [0; 11 * 48];
            (request[0], request[11 * 48 - 4]) = (3, 5);
            let mut answer = [0; 4];
            mailbox.call_into(&request, &mut answer, LONG).unwrap();
            assert_eq!(answer, [6, 0, 0, 0], "{peer:?}");
            for (wrong, room) in [(&request[48..], 4), (&request, 49)] {
                let refused = mailbox.call_into(wrong, &mut vec![0; room], LONG);
                assert!(
                    matches!(refused, Err(ChannelError::Failed(error)) if error.kind() == ErrorKind::InvalidArgument)
                );
            }
            assert!(control.kernel_has_started() && !control.kernel_has_ended());
            control.stop();
        });
        assert!(control.kernel_has_ended());
    }
}
