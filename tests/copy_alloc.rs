//! Stores and loads allocate nothing.

#![allow(unsafe_code, reason = "copies take raw pointers")]

mod common;

use std::time::Duration;

use common::counting::{Counting, calls_during};
use gdrcopy::channel::{ChannelBuilder, ChannelError, Latest, Mailbox, peer};
use gdrcopy::{BackendKind, Session, copy};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_counter_counts() {
    assert_eq!(calls_during(|| drop(std::hint::black_box(vec![0_u8; 64]))), 2);
}

#[test]
fn copies_allocate_nothing() {
    const BYTES: usize = 8192;
    // Page-aligned, so that offsets near the end of the first page reach the path for parts at a page boundary.
    #[repr(align(4096))]
    struct Pages([u8; BYTES]);
    let (host, mut device) = (Box::new(Pages([0x5A; BYTES])), Box::new(Pages([0; BYTES])));
    let mut back = Box::new(Pages([0; BYTES]));
    let device = device.0.as_mut_ptr();

    for routine in copy::routines().iter().filter(|routine| routine.is_available()) {
        let calls = calls_during(|| {
            for at in [0, 1, 8, 63, 4033, 4095] {
                for len in (0..300).chain([BYTES - at]) {
                    for host_at in [0, 5, 4070, 4095] {
                        let len = len.min(BYTES - host_at).min(BYTES - at);
                        let there = device.wrapping_add(at);
                        // SAFETY: available; both ranges lie in their buffers, which nothing else borrows.
                        unsafe { routine.store(there, &host.0[host_at..host_at + len]) };
                        // SAFETY: as above; the device buffer is whole pages.
                        unsafe { routine.load(&mut back.0[host_at..host_at + len], there) };
                    }
                }
            }
            // SAFETY: available; the buffer starts on a page.
            unsafe { routine.post_line(device, &[1; 64]) };
        });
        assert_eq!(calls, 0, "{routine:?}");
    }
}

#[test]
fn messages_allocate_nothing() {
    const LONG: Duration = Duration::from_secs(60);
    let session = Session::builder().ignore_env().backend(BackendKind::Emulated).open().expect("it is everywhere");
    let open = || ChannelBuilder::new().lines_to_gpu(64).kernel_limit(LONG).open(&session).expect("a channel");

    let (mut sender, mut receiver) = open();
    let mut latest = Latest::new(&session, None, &[0_u64; 20]).expect("a value");
    let calls = calls_during(|| {
        let mut sent = 0;
        while sender.try_send(&[1; 100]).is_ok() {
            sent += 1;
        }
        assert!(sent > 10 && matches!(sender.try_send_line(&[0; 48]), Ok(()) | Err(ChannelError::Full)));
        assert!(matches!(sender.send(&[1; 1000], Duration::ZERO), Err(ChannelError::TimedOut)));
        assert!(matches!(receiver.try_recv(&mut [0; 64]), Ok(None)));
        latest.set(&[7; 20]).expect("it is ours");
    });
    assert_eq!(calls, 0, "without a kernel");

    let (sender, receiver) = open();
    let device = sender.device();
    let mut mailbox = Mailbox::<[u64; 30], u64>::new(sender, receiver).expect("its two ends");
    std::thread::scope(|scope| {
        // SAFETY: the scope ends before the channel.
        scope.spawn(|| unsafe { peer::answer::<[u64; 30], u64>(&device, |request| request.iter().sum()) });
        let mut sum = 0;
        let calls = calls_during(|| {
            for _ in 0..100 {
                sum += mailbox.call(&[1; 30], LONG).unwrap_or(0);
            }
        });
        mailbox.stop();
        assert_eq!((calls, sum), (0, 3000));
    });
}
