//! Lines and messages through both rings.

use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::ErrorKind;
use gdrcopy::channel::{ChannelBuilder, ChannelError, DeviceChannel, Sender};

use crate::common::fork;
use crate::kernels::{Report, payload_of, peers};
use crate::{LONG, STARTS, session};

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    crate::common::subject::pattern(seed, len)
}

#[test]
fn messages_of_every_length_come_back() {
    const MOST: usize = 16 * 48 - 4;
    for peer in peers() {
        for start in STARTS {
            let small = ChannelBuilder::new().lines_to_gpu(32).lines_to_host(32).first_lines(start, start ^ 1);
            let (mut sender, mut receiver) = small.kernel_limit(LONG).open(&session()).unwrap();
            let device = sender.device();
            thread::scope(|scope| {
                scope.spawn(|| peer.mirror(&device));
                let mut answer = vec![0; MOST];
                for len in 0..=MOST {
                    let message = pattern(len, len);
                    sender.send(&message, LONG).unwrap();
                    let bytes = receiver.recv(&mut answer, LONG).unwrap();
                    let wanted: Vec<u8> = message.iter().map(|byte| !byte).collect();
                    assert_eq!(&answer[..bytes], wanted, "{peer:?}, {len} bytes from line {start}");
                }
                assert!(receiver.try_recv(&mut answer).unwrap().is_none());
                sender.stop();
            });
            assert!(sender.kernel_has_started() && sender.kernel_has_ended());
        }
    }
}

/// A ring of 32 lines is where the kernel took it, and where the first line went if that was before the kernel started.
#[test]
fn a_short_ring_settles_with_its_first_line() {
    for peer in peers() {
        for is_early in [false, true] {
            let builder = ChannelBuilder::new().lines_to_gpu(32).first_lines(5, 6).kernel_limit(LONG);
            let (mut sender, mut receiver) = builder.open(&session()).unwrap();
            let device = sender.device();
            assert!(device.places > 1, "{device:?}");
            assert_eq!(sender.free_lines(), 32);
            if is_early {
                sender.send(b"early", LONG).unwrap();
            }
            thread::scope(|scope| {
                scope.spawn(|| peer.mirror(&device));
                while !sender.kernel_has_started() {
                    thread::yield_now();
                }
                if !is_early {
                    sender.send(b"early", LONG).unwrap();
                }
                let mut answer = [0; 100];
                for n in 0..100 {
                    let bytes = receiver.recv(&mut answer, LONG).unwrap();
                    let wanted = if n == 0 { b"early".to_vec() } else { pattern(n, n) };
                    assert_eq!(answer[..bytes], wanted.iter().map(|byte| !byte).collect::<Vec<u8>>(), "{peer:?} {n}");
                    sender.send(&pattern(n + 1, n + 1), LONG).unwrap();
                }
                sender.stop();
            });
            // The last place is nobody's but a kernel's that took it.
            let ring = usize::try_from(device.in_ring).unwrap();
            let has_lines = |place: usize| {
                let at = ring + place * DeviceChannel::PLACE;
                // SAFETY: the number of a ring's first part, on emulated GPUs at an address of this process; nobody writes.
                let number = unsafe { std::ptr::with_exposed_provenance::<u32>(at).read_volatile() };
                // Slot 0 is line 32's, and before that of the lap before.
                number != 0
            };
            let places = usize::try_from(device.places).unwrap();
            let wanted = if is_early { 0 } else { places - 1 };
            let used: Vec<usize> = (0..places).filter(|&place| has_lines(place)).collect();
            assert_eq!(used, [wanted], "{peer:?}");
        }
    }
    let (sender, _) = ChannelBuilder::new().lines_to_gpu(64).open(&session()).unwrap();
    assert_eq!(sender.device().places, 1);
}

#[test]
fn a_full_ring_takes_nothing_and_loses_nothing() {
    for peer in peers() {
        let (mut sender, mut receiver) = ChannelBuilder::new()
            .lines_to_gpu(64)
            .lines_to_host(32)
            .first_lines(7, 9)
            .kernel_limit(LONG)
            .open(&session())
            .unwrap();
        let device = sender.device();
        let message = |n: usize| pattern(n, n * 7 % 300);
        // Nobody receives yet.
        let mut sent = 0;
        while sender.try_send(&message(sent)).is_ok() {
            sent += 1;
        }
        assert!(matches!(sender.try_send(&message(sent)), Err(ChannelError::Full)));
        assert!(sent > 3 && sender.free_lines() < 32, "{sent}");
        let started = Instant::now();
        let tired = sender.send(&message(sent), Duration::from_millis(20));
        assert!(matches!(tired, Err(ChannelError::TimedOut)), "{tired:?}");
        assert!(started.elapsed() >= Duration::from_millis(20));
        thread::scope(|scope| {
            scope.spawn(|| peer.mirror(&device));
            let mut answer = [0; 300];
            for n in 0..1000 {
                while sent < n + 50 && sender.try_send(&message(sent)).is_ok() {
                    sent += 1;
                }
                let bytes = receiver.recv(&mut answer, LONG).unwrap();
                let wanted: Vec<u8> = message(n).iter().map(|byte| !byte).collect();
                assert_eq!(&answer[..bytes], wanted, "{peer:?}, message {n}");
            }
            sender.stop();
        });
    }
}

/// Sends the messages with these numbers in batches.
fn send(sender: &mut Sender, first: u64, end: u64) {
    let numbers: Vec<u64> = (first..end).collect();
    for batch in numbers.chunks(50) {
        let payloads: Vec<[u8; 48]> = batch.iter().map(|&number| payload_of(number)).collect();
        let mut left = &payloads[..];
        while !left.is_empty() {
            let sent = sender.try_send_lines(left).unwrap();
            left = &left[sent..];
            if sent == 0 {
                sender.send_line(&left[0], LONG).unwrap();
                left = &left[1..];
            }
        }
    }
}

#[test]
fn every_line_arrives_once_and_in_order_at_one_reader_and_at_several() {
    for peer in peers() {
        for (readers, start) in [(1, 0), (1, u32::MAX - 1000), (3, u32::MAX - 999), (4, 0)] {
            let count = 32 * 12 * 60;
            let (mut sender, _receiver) = ChannelBuilder::new()
                .lines_to_gpu(128)
                .first_lines(start, 0)
                .readers(readers)
                .kernel_limit(LONG)
                .open(&session())
                .unwrap();
            let device = sender.device();
            let reports: Vec<Report> = (0..readers).map(|_| Report::default()).collect();
            // Full before anybody receives.
            let mut filled = 0;
            while sender.try_send_line(&payload_of(filled)).is_ok() {
                filled += 1;
            }
            assert_eq!(filled, 128);
            thread::scope(|scope| {
                for reader in 0..readers {
                    let (device, reports) = (&device, &reports);
                    scope.spawn(move || peer.sink(device, reader, count, reports));
                }
                send(&mut sender, filled, count);
            });
            for report in &reports {
                let found = [0, 1, 2, 3].map(|at| report.get(at));
                assert_eq!(found, [2, count / u64::from(readers), 0, 0], "{peer:?}, {readers} readers from {start}");
            }
        }
    }
}

#[test]
fn every_line_from_the_kernel_arrives_once_and_in_order() {
    for peer in peers() {
        for start in STARTS {
            let small = ChannelBuilder::new().lines_to_host(32).first_lines(0, start).kernel_limit(LONG);
            let (sender, mut receiver) = small.open(&session()).unwrap();
            let device = sender.device();
            thread::scope(|scope| {
                scope.spawn(|| peer.source(&device, 20_000));
                for number in 0..20_000 {
                    assert_eq!(receiver.recv_line(LONG).unwrap(), payload_of(number), "{peer:?} {number}");
                }
                // It ended by itself, and nothing is left.
                assert!(matches!(receiver.recv_line(LONG), Err(ChannelError::KernelGone)));
            });
        }
    }
}

#[test]
fn a_kernel_ends_by_itself_and_finds_no_message_in_fresh_rings() {
    for peer in peers() {
        for start in STARTS {
            let builder = ChannelBuilder::new().first_lines(start, start).kernel_limit(Duration::from_millis(30));
            let (sender, mut receiver) = builder.open(&session()).unwrap();
            let device = sender.device();
            let started = Instant::now();
            peer.mirror(&device);
            assert!(started.elapsed() >= Duration::from_millis(30));
            assert!(matches!(receiver.recv(&mut [0; 8], LONG), Err(ChannelError::KernelGone)));
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let session = session();
    let refused = |builder: ChannelBuilder| builder.open(&session).unwrap_err().kind();
    for lines in [0, 16, 33, 1 << 21] {
        assert_eq!(refused(ChannelBuilder::new().lines_to_gpu(lines)), ErrorKind::InvalidArgument);
        assert_eq!(refused(ChannelBuilder::new().lines_to_host(lines)), ErrorKind::InvalidArgument);
    }
    assert_eq!(refused(ChannelBuilder::new().readers(0)), ErrorKind::InvalidArgument);
    assert_eq!(refused(ChannelBuilder::new().readers(33)), ErrorKind::InvalidArgument);
    assert_eq!(refused(ChannelBuilder::new().gpu(1)), ErrorKind::NoDevice);

    let kind = |error: ChannelError| match error {
        ChannelError::Failed(error) => error.kind(),
        other => panic!("{other}"),
    };
    let (mut sender, mut receiver) = ChannelBuilder::new().open(&session).unwrap();
    assert_eq!(kind(sender.try_send(&[0; 512 * 48 - 3]).unwrap_err()), ErrorKind::OutOfBounds);
    sender.try_send(&[0; 512 * 48 - 4]).unwrap();
    let (mut several, _receiver) = ChannelBuilder::new().readers(2).open(&session).unwrap();
    assert_eq!(kind(several.try_send(b"one").unwrap_err()), ErrorKind::InvalidArgument);
    assert!(matches!(receiver.recv_line(Duration::ZERO), Err(ChannelError::TimedOut)));
}

#[test]
fn a_message_too_long_for_its_slice_stays_and_no_message_is_told_apart() {
    for peer in peers() {
        let (mut sender, mut receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session()).unwrap();
        let device = sender.device();
        thread::scope(|scope| {
            scope.spawn(|| peer.mirror(&device));
            sender.send(&[1; 100], LONG).unwrap();
            let short = receiver.recv(&mut [0; 99], LONG).unwrap_err().to_string();
            assert!(short.contains("100 bytes"), "{short}");
            assert_eq!(receiver.recv(&mut [0; 100], LONG).unwrap(), 100);
            sender.stop();
        });
        let (mut sender, mut receiver) = ChannelBuilder::new().kernel_limit(LONG).open(&session()).unwrap();
        let device = sender.device();
        thread::scope(|scope| {
            scope.spawn(|| peer.answer(&device, 1, 1, 0));
            // What comes back begins with a length that no message has.
            let mut line = [0; 48];
            line[..4].fill(0xff);
            sender.send_line(&line, LONG).unwrap();
            let odd = receiver.recv(&mut [0; 64], LONG).unwrap_err();
            assert!(matches!(&odd, ChannelError::Failed(e) if e.kind() == ErrorKind::UnknownLayout), "{odd}");
            sender.stop();
        });
    }
}

#[test]
fn a_forked_child_is_refused() {
    let (mut sender, mut receiver) = ChannelBuilder::new().open(&session()).unwrap();
    fork::in_child(|| {
        let refused =
            |error: ChannelError| matches!(error, ChannelError::Failed(e) if e.kind() == ErrorKind::WrongProcess);
        assert!(refused(sender.try_send(b"x").unwrap_err()));
        assert!(refused(sender.try_send_line(&[0; 48]).unwrap_err()));
        assert!(refused(receiver.try_recv_line().unwrap_err()));
    });
    sender.try_send(b"x").unwrap();
}
