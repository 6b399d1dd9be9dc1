//! The kernels that measurements and soaks on a GPU are made with, played by threads: that they answer, count and check as
//! they say, also where numbers pass 32 bits, and that each fault is noticed for what it is.

use std::thread;

use gdrcopy::channel::{ChannelBuilder, Mailbox, Sender};

use crate::kernels::{Library, Report, joined, payload_of, ring_kernels};
use crate::{LONG, STARTS, session};

/// Words of a report: messages, torn, ahead, behind, the first that was wrong.
const WORDS: [usize; 5] = [1, 2, 3, 4, 5];

fn addr<T>(of: &T) -> u64 {
    u64::try_from(std::ptr::from_ref(of).expose_provenance()).unwrap()
}

fn low_half(number: u64) -> u32 {
    u32::try_from(number & 0xffff_ffff).unwrap()
}

#[test]
fn lines_are_echoed_from_registers() {
    let Some(library) = ring_kernels() else { return };
    for name in [c"echo", c"echo_line"] {
        for start in STARTS {
            let small = ChannelBuilder::new().lines_to_gpu(32).lines_to_host(32).first_lines(start, start ^ 1);
            let (sender, receiver) = small.kernel_limit(LONG).open(&session()).unwrap();
            let device = sender.device();
            let mut mailbox = Mailbox::<[u32; 12], [u32; 12]>::new(sender, receiver).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| library.run(name, 0, device.to_words()));
                for n in 0..500 {
                    let line: [u32; 12] = std::array::from_fn(|at| n * 100 + u32::try_from(at).unwrap());
                    assert_eq!(mailbox.call(&line, LONG).unwrap(), line.map(|word| !word), "{name:?} {n} from {start}");
                }
                mailbox.stop();
            });
        }
    }
}

#[test]
fn a_request_of_512_bytes_is_answered_and_checked() {
    let Some(library) = ring_kernels() else { return };
    let (sender, receiver) = ChannelBuilder::new().lines_to_gpu(32).kernel_limit(LONG).open(&session()).unwrap();
    let (device, report) = (sender.device(), Report::default());
    let mut mailbox = Mailbox::<[u32; 128], u32>::new(sender, receiver).unwrap();
    let request = |first: u32| -> [u32; 128] {
        std::array::from_fn(|n| first.wrapping_add(u32::try_from(n).unwrap().wrapping_mul(0x9e37_79b9)))
    };
    let last = thread::scope(|scope| {
        let words: [u64; 11] = joined(device.to_words(), [addr(&report)]);
        scope.spawn(move || library.run(c"ask", 0, words));
        for n in 0..500 {
            let asked = request(n * 77);
            assert_eq!(mailbox.call(&asked, LONG).unwrap(), asked[0] ^ asked[127], "{n}");
        }
        // One word of the middle that does not belong there.
        let mut odd = request(5);
        odd[64] ^= 1;
        let last = mailbox.call(&odd, LONG).unwrap();
        mailbox.stop();
        last
    });
    assert_eq!(last, request(5)[0] ^ request(5)[127]);
    assert_eq!([0, 1, 2].map(|at| report.get(at)), [2, 501, 1]);
}

/// Has `soak` receive what `send` sends; what each report says in [`WORDS`].
fn soak(
    library: &'static Library,
    readers: u32,
    first: u64,
    count: u64,
    send: impl FnOnce(&mut Sender),
) -> Vec<[u64; 5]> {
    let builder = ChannelBuilder::new().lines_to_gpu(128).first_lines(low_half(first), 0).readers(readers);
    let (mut sender, _receiver) = builder.kernel_limit(LONG).open(&session()).unwrap();
    let device = sender.device();
    let reports: Vec<Report> = (0..readers).map(|_| Report::default()).collect();
    thread::scope(|scope| {
        for reader in 0..readers {
            let words: [u64; 14] = joined(device.to_words(), [first, count, u64::MAX, addr(&reports[0])]);
            scope.spawn(move || library.run(c"soak", reader, words));
        }
        send(&mut sender);
    });
    assert!(reports.iter().all(|report| report.get(0) == 2));
    reports.iter().map(|report| WORDS.map(|at| report.get(at))).collect()
}

#[test]
fn a_soak_is_clean_past_the_end_of_32_bits() {
    let Some(library) = ring_kernels() else { return };
    for (readers, first) in [(1, 0), (1, (1 << 32) - 1000), (3, (1 << 32) - 960), (4, (23 << 32) - 64), (1, 5 << 35)] {
        let count = 32 * 12 * 20;
        let reports = soak(library, readers, first, count, |sender| {
            for number in first..first + count {
                sender.send_line(&payload_of(number), LONG).unwrap();
            }
        });
        for report in reports {
            assert_eq!(report, [count / u64::from(readers), 0, 0, 0, u64::MAX], "{readers} readers from {first}");
        }
    }
}

#[test]
fn a_soak_tells_faults_apart() {
    const FIRST: u64 = (1 << 32) - 50;
    let Some(library) = ring_kernels() else { return };
    let with = |fault: &dyn Fn(&mut Vec<[u8; 48]>)| {
        let mut payloads: Vec<[u8; 48]> = (FIRST..FIRST + 100).map(payload_of).collect();
        fault(&mut payloads);
        let reports = soak(library, 1, FIRST, 96, |sender| {
            payloads[..96].iter().for_each(|payload| sender.send_line(payload, LONG).unwrap());
        });
        reports[0]
    };
    assert_eq!(with(&|_| {}), [96, 0, 0, 0, u64::MAX]);
    let lost = with(&|payloads| {
        payloads.remove(90);
    });
    assert_eq!(lost, [96, 0, 6, 0, FIRST + 90]);
    let doubled = with(&|payloads| payloads.insert(90, payload_of(FIRST + 89)));
    assert_eq!(doubled, [96, 0, 0, 6, FIRST + 90]);
    let swapped = with(&|payloads| payloads.swap(40, 60));
    assert_eq!(swapped, [96, 0, 1, 1, FIRST + 40]);
    let torn = with(&|payloads| payloads[7][24..36].copy_from_slice(&payload_of(FIRST + 39)[24..36]));
    assert_eq!(torn, [96, 1, 0, 0, FIRST + 7]);
    // 2^32 + 10 becomes 10.
    let other = with(&|payloads| payloads[60][0] ^= 1);
    assert_eq!(other, [96, 0, 0, 1, FIRST + 60]);
}

#[test]
fn samples_of_what_arrives_are_answered() {
    const SLOTS: usize = 256;
    let Some(library) = ring_kernels() else { return };
    for (readers, every_log2) in [(1, 0), (1, 2), (2, 1), (4, 0)] {
        let count: u64 = 32 * 64;
        let builder = ChannelBuilder::new().lines_to_gpu(128).first_lines(u32::MAX - 700, 0).readers(readers);
        let (mut sender, _receiver) = builder.kernel_limit(LONG).open(&session()).unwrap();
        let device = sender.device();
        let reports: Vec<Report> = (0..readers).map(|_| Report::default()).collect();
        let answers: Vec<Report> = (0..SLOTS).map(|_| Report::default()).collect();
        thread::scope(|scope| {
            for reader in 0..readers {
                let slots = u64::try_from(SLOTS).unwrap();
                let more = [count, u64::MAX, every_log2, addr(&answers[0]), slots, addr(&reports[0])];
                let words: [u64; 16] = joined(device.to_words(), more);
                scope.spawn(move || library.run(c"arrive", reader, words));
            }
            for number in 0..count {
                sender.send_line(&payload_of(number), LONG).unwrap();
            }
        });
        let samples = (count / 32) >> every_log2;
        for (answer, sample) in answers.iter().zip(0_u64..) {
            assert_eq!(
                answer.get(0),
                if sample < samples { sample + 1 } else { 0 },
                "{readers} {every_log2}: {sample}"
            );
        }
        for report in &reports {
            let found = WORDS.map(|at| report.get(at));
            assert_eq!(found, [count / u64::from(readers), 0, 0, 0, u64::MAX], "{readers} readers, {every_log2}");
        }
    }
}

#[test]
fn messages_pour_out_past_the_end_of_32_bits() {
    const COUNT: u64 = 8 * 2000;
    let Some(library) = ring_kernels() else { return };
    for first in [0, (1 << 32) - 800, (1 << 33) - 8] {
        let builder = ChannelBuilder::new().lines_to_host(32).first_lines(0, low_half(first)).kernel_limit(LONG);
        let (sender, mut receiver) = builder.open(&session()).unwrap();
        let words: [u64; 12] = joined(sender.device().to_words(), [first, COUNT]);
        thread::scope(|scope| {
            scope.spawn(move || library.run(c"pour", 0, words));
            for number in first..first + COUNT {
                assert_eq!(receiver.recv_line(LONG).unwrap(), payload_of(number), "{number}");
            }
        });
    }
}

#[cfg(feature = "cuda")]
#[test]
fn the_kernels_parameters_are_as_long_as_these() {
    const PTX: &str = include_str!("../ptx/rings.ptx");
    for (name, words) in [("echo", 10), ("echo_line", 10), ("ask", 11), ("soak", 14), ("arrive", 16), ("pour", 12)] {
        assert_eq!(gdrcopy::cuda::parameter_bytes(PTX, name), Some(8 * words), "{name}");
    }
}
