//! Long runs on a real GPU: what `post_line` and `publish` promise, read by a kernel while it is being written; and what an
//! automatic copier promises of the copy engine.
//!
//! By default the former take about a second each. `GDRCOPY_SOAK_MESSAGES=10000000000` and `GDRCOPY_SOAK_ROUNDS=100000000`
//! make them long: half a minute for each routine and ten seconds, on an H200. `GDRCOPY_SOAK_ENGINE_ROUNDS` (1000000) rounds
//! of the copy engine have two CUDA calls each. Every soak has a control, in which the writer breaks the rule
//! on purpose and the reader must notice.
//!
//! Without a GPU every test prints `SKIPPED` with the reason and passes. Kernels occupy the device: run them one at a time
//! (`RUST_TEST_THREADS=1`).
#![cfg(feature = "cuda")]
#![allow(unsafe_code, missing_docs, reason = "tests launch kernels beside the library")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "memory shared with a kernel"
)]
#![allow(clippy::as_conversions, clippy::unwrap_used, reason = "tests may panic and convert freely")]

#[path = "common/engine.rs"]
#[allow(unreachable_pub, reason = "shared with the other test binaries")]
mod engine;
#[path = "common/env.rs"]
mod env;
#[allow(dead_code, reason = "shared with the binary `gpu`, which uses all of it")]
#[path = "gpu/support.rs"]
mod support;

use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use env::from_env;
use gdrcopy::cuda::{Module, PinnedHost, Priority, Stream, parameter_bytes};
use gdrcopy::{BackendKind, Mapping, Session};
use zerocopy::IntoBytes;

const PTX: &str = include_str!("ptx/soak.ptx");

const LINE: usize = 64;
/// Threads of a block: four warps.
const THREADS: u32 = 128;
/// Bytes of what a warp counts: state, then seven words.
const COUNTS: usize = 64;
/// Where the warps' counts begin, behind the word that stops them.
const COUNTS_AT: usize = 128;

/// A session on the GPU that copies with this routine, or a line that says why there is none.
fn session(routine: Option<&str>) -> Option<Session> {
    let mut builder = Session::builder().ignore_env().backend(BackendKind::Rm);
    if let Some(name) = routine {
        if let Err(error) = gdrcopy::copy::by_name(name) {
            println!("SKIPPED: {error}");
            return None;
        }
        builder = builder.copy_routine(name);
    }
    support::opened(builder.open(), BackendKind::Rm)
}

/// A kernel that reads until dropped.
struct Reader<'a> {
    stream: Stream<'a>,
    control: &'a PinnedHost,
    warps: usize,
}

impl<'a> Reader<'a> {
    /// Memory for the stop word and the counts of `warps` warps.
    fn control(warps: usize) -> PinnedHost {
        PinnedHost::new(0, COUNTS_AT + COUNTS * warps).unwrap()
    }

    /// Starts `warps` warps and waits until all of them run. `words` gets the addresses of stop word and counts.
    fn start(
        module: &'a Module,
        name: &CStr,
        control: &'a PinnedHost,
        warps: usize,
        words: impl FnOnce(u64, u64) -> Vec<u64>,
    ) -> Self {
        let kernel = module.kernel(name).unwrap();
        let blocks = warps as u32 * 32 / THREADS;
        assert!(kernel.resident_blocks(THREADS).unwrap() >= blocks, "{blocks} blocks do not fit on this GPU at once");
        let stream = module.stream(Priority::High).unwrap();
        let address = control.gpu_addr().unwrap().raw();
        let words = words(address, address + COUNTS_AT as u64);
        assert_eq!(parameter_bytes(PTX, name.to_str().unwrap()), Some(words.len() * 8));
        unsafe { kernel.launch(&stream, blocks, THREADS, &words).unwrap() };
        let reader = Self { stream, control, warps };
        let started = Instant::now();
        while (0..warps).any(|warp| reader.count(warp, 0) == 0) {
            assert!(started.elapsed() < Duration::from_secs(10), "the kernel does not start");
        }
        reader
    }

    fn count(&self, warp: usize, word: usize) -> u64 {
        let at = self.control.as_ptr().wrapping_add(COUNTS_AT + warp * COUNTS + 8 * word);
        unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
    }

    /// Ends the kernel; what each warp counted.
    fn stop(self) -> Vec<[u64; 8]> {
        unsafe { AtomicU32::from_ptr(self.control.as_ptr().cast()) }.store(1, Ordering::Release);
        self.stream.finish(Duration::from_secs(30)).unwrap();
        assert!((0..self.warps).all(|warp| self.count(warp, 0) == 2), "a warp did not report");
        (0..self.warps).map(|warp| std::array::from_fn(|word| self.count(warp, word))).collect()
    }
}

/// A count of all warps together.
fn sum(counts: &[[u64; 8]], word: usize) -> u64 {
    counts.iter().map(|warp| warp[word]).sum()
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        // Freeing its memory would wait for the kernel, also while a test fails.
        unsafe { AtomicU32::from_ptr(self.control.as_ptr().cast()) }.store(1, Ordering::Release);
        let _ = self.stream.finish(Duration::from_secs(30));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

// --- stores, then the copy engine ------------------------------------------------------------------------------------------

/// Between this thread's stores and the engine's copy is an `SFENCE` where the GPU orders writes, and a flush elsewhere.
#[test]
fn the_copy_engine_finds_what_was_written_before() {
    let Some(session) = session(None) else { return };
    let buffer = session.alloc(engine::BYTES).unwrap();
    let (mut copier, mut host) = engine::copier(&session, &buffer);
    let rounds: usize = from_env("GDRCOPY_SOAK_ENGINE_ROUNDS", 1_000_000);
    let started = Instant::now();
    let seen = engine::rounds(&mut copier, host.as_mut_slice(), rounds, false);
    println!(
        "copy engine soak: {rounds} rounds of 1 to 4096 bytes in {:.1} s, writes ordered by the GPU: {}; {} reads without \
         what was stored before, {} writes that did not stay",
        started.elapsed().as_secs_f64(),
        copier.mapping().publish_is_ordered(),
        seen.stale_reads,
        seen.lost_writes,
    );
    assert_eq!(seen, engine::Seen { rounds, ..engine::Seen::default() });
    let late = engine::rounds(&mut copier, host.as_mut_slice(), 1000, true);
    println!("copy engine control, stores that come late: {late:?}");
    // One byte can be what it was by chance.
    assert!(late.stale_reads > 900 && late.lost_writes == 1000, "{late:?}");
}

// --- torn reads ----------------------------------------------------------------------------------------------------------

/// What readers saw of lines that were written meanwhile.
#[derive(Debug, Default, Clone, Copy)]
struct Torn {
    messages: u64,
    time: Duration,
    parts: u64,
    fresh_parts: u64,
    mixed_parts: u64,
    backward_parts: u64,
    lines: u64,
    uneven_lines: u64,
}

impl Torn {
    fn add(&mut self, other: &Self) {
        self.messages += other.messages;
        self.time += other.time;
        self.parts += other.parts;
        self.fresh_parts += other.fresh_parts;
        self.mixed_parts += other.mixed_parts;
        self.backward_parts += other.backward_parts;
        self.lines += other.lines;
        self.uneven_lines += other.uneven_lines;
    }

    fn print(&self, what: &str) {
        println!(
            "{what}: {} messages by {WRITERS} threads, {:.2} ns each; 16-byte parts read {}, new {}, mixed {}, gone back {}; lines seen new {}, \
             with unlike parts {}",
            self.messages,
            nanoseconds(self.time) as f64 / self.messages as f64,
            self.parts,
            self.fresh_parts,
            self.mixed_parts,
            self.backward_parts,
            self.lines,
            self.uneven_lines,
        );
    }
}

/// 64 bytes in which a 32-bit number is repeated.
#[repr(C, align(64))]
struct Line([u32; LINE / 4]);

/// Threads that write, each over lines of its own.
const WRITERS: usize = 4;

/// Writes at least `messages` lines by `write(offset, number)`: each thread over `lines` lines in turn, while 64 warps read
/// them.
fn torn(
    module: &Module,
    session: &Session,
    lines: usize,
    messages: u64,
    write: impl Fn(&Mapping<'_>, usize, u32) + Sync,
) -> Torn {
    const WARPS: usize = 64;
    assert!(lines.is_power_of_two(), "a division would cost more than the message");
    let all_lines = WRITERS * lines;
    let each = messages.div_ceil(WRITERS as u64);
    let buffer = session.alloc(all_lines * LINE).unwrap();
    buffer.upload(0, &vec![0; all_lines * LINE]).unwrap();
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    let control = Reader::control(WARPS);
    let limit = Duration::from_secs(60) + Duration::from_micros(messages / 10);
    let reader = Reader::start(module, c"torn", &control, WARPS, |stop, counts| {
        vec![buffer.addr().raw(), all_lines as u64, stop, counts, nanoseconds(limit)]
    });
    let started = Instant::now();
    let one_writer = |first: usize| {
        for number in 1..=each {
            write(&mapping, (first + (number as usize & (lines - 1))) * LINE, number as u32);
        }
        mapping.flush().unwrap();
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            scope.spawn(move || one_writer(writer * lines));
        }
    });
    let time = started.elapsed();
    let counts = reader.stop();
    let [parts, fresh_parts, mixed_parts, backward_parts, lines, uneven_lines] =
        [1, 2, 3, 4, 5, 6].map(|word| sum(&counts, word));
    let messages = each * WRITERS as u64;
    Torn { messages, time, parts, fresh_parts, mixed_parts, backward_parts, lines, uneven_lines }
}

fn torn_by(routine: &str) {
    let Some(session) = session(Some(routine)) else { return };
    let module = Module::load(0, PTX).unwrap();
    let messages: u64 = from_env("GDRCOPY_SOAK_MESSAGES", 100_000_000);
    let mut all = Torn::default();
    // Few lines, each rewritten every few nanoseconds; and more than the readers can look at between two messages.
    for lines in [8, 64, 512] {
        let seen = torn(&module, &session, lines, messages.div_ceil(3), |mapping, offset, number| {
            let line = Line([number; LINE / 4]);
            mapping.post_line(offset, line.0.as_bytes().try_into().unwrap()).unwrap();
        });
        seen.print(&format!("  {routine}, {lines} lines"));
        all.add(&seen);
    }
    all.print(&format!("torn-read soak, {routine}"));
    assert!(all.fresh_parts > all.messages / 1000, "the readers saw next to nothing");
    assert_eq!(all.mixed_parts, 0, "16 bytes that were written by one post_line were read in two halves");
}

#[test]
fn a_part_of_a_posted_line_is_never_mixed_avx512() {
    torn_by("avx512");
}

#[test]
fn a_part_of_a_posted_line_is_never_mixed_movdir64b() {
    torn_by("movdir64b");
}

/// The control: lines written 4 bytes at a time must be seen half done.
#[test]
fn a_line_written_word_by_word_is_seen_mixed() {
    let Some(session) = session(None) else { return };
    let module = Module::load(0, PTX).unwrap();
    let seen = torn(&module, &session, 8, 20_000, |mapping, offset, number| {
        (0..LINE).step_by(4).for_each(|at| mapping.store_u32(offset + at, number).unwrap());
    });
    seen.print("torn-read control, 4 bytes at a time");
    assert!(seen.mixed_parts > 0, "the reader cannot see a mixed part");
}

// --- data, then flag -----------------------------------------------------------------------------------------------------

const DATA_AT: usize = 128;
const CREDIT_STRIDE: usize = 64;
const SIZES: usize = 256;
const LARGER: [usize; 6] = [300, 512, 1000, 1024, 2048, 4096];
const OFFSETS: usize = 64;
const CELLS: usize = (SIZES + LARGER.len()) * OFFSETS;
const SLOT: usize = (DATA_AT + 4096 + OFFSETS).next_multiple_of(128);
const SLOTS_PER_WRITER: usize = 32;

/// Size and offset of a round.
fn cell(n: usize) -> (usize, usize) {
    let (size, offset) = (n % CELLS / OFFSETS, n % OFFSETS);
    (if size < SIZES { size + 1 } else { LARGER[size - SIZES] }, offset)
}

/// What one writer does to a slot in one round: `(mapping, data offset, data, flag offset, flag)`.
type Publish = fn(&Mapping<'_>, usize, &[u8], usize, u64);

/// One thread, with slots of its own, each of which it writes again as soon as the reader has checked it.
fn write_slots(mapping: &Mapping<'_>, credits: &PinnedHost, writer: usize, rounds: u64, publish: Publish) {
    // Byte `at` of round `r` is `c(r) + at`: a window into this table.
    let table: Vec<u8> = (0..256 + SLOT).map(|n| n as u8).collect();
    let first = writer * SLOTS_PER_WRITER;
    let credit = |slot: usize| {
        let at = credits.as_ptr().wrapping_add((first + slot) * CREDIT_STRIDE);
        unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire)
    };
    let mut sent = [0_u32; SLOTS_PER_WRITER];
    // Writers start in different places of the grid.
    let (mut n, mut done) = (writer * 2003, 0);
    let mut progress = Instant::now();
    while done < rounds {
        let before = done;
        for (slot, sent) in sent.iter_mut().enumerate() {
            if credit(slot) != *sent || done == rounds {
                continue;
            }
            *sent += 1;
            let round = *sent;
            let (size, offset) = cell(n);
            let start = (round.wrapping_mul(0x9d).wrapping_add(round >> 7) as usize + offset) % 256;
            let flag = u64::from(round) | (size as u64) << 32 | (offset as u64) << 48;
            let base = (first + slot) * SLOT;
            publish(mapping, base + DATA_AT + offset, &table[start..start + size], base, flag);
            (n, done) = (n + 1, done + 1);
        }
        if done > before {
            progress = Instant::now();
        }
        assert!(progress.elapsed() < Duration::from_secs(20), "the reader does not answer: round {done} of {rounds}");
    }
    while (0..SLOTS_PER_WRITER).any(|slot| credit(slot) != sent[slot]) {
        assert!(progress.elapsed() < Duration::from_secs(20), "the reader does not answer at the end");
    }
}

/// Publishes `rounds` rounds from several threads to as many warps as there are slots; what they counted: rounds, and
/// rounds with a violation.
fn order(session: &Session, module: &Module, acquire: bool, rounds: u64, publish: Publish) -> [u64; 2] {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let writers = (cores / 2).clamp(1, 8);
    let warps = writers * SLOTS_PER_WRITER;
    let buffer = session.alloc(warps * SLOT).unwrap();
    buffer.upload(0, &vec![0; warps * SLOT]).unwrap();
    let mapping = session.pin(&buffer).unwrap().map().unwrap();
    let credits = PinnedHost::new(0, warps * CREDIT_STRIDE).unwrap();
    let control = Reader::control(warps);
    let limit = Duration::from_secs(60) + Duration::from_micros(10 * rounds);
    let reader = Reader::start(module, c"order", &control, warps, |stop, counts| {
        let credits = credits.gpu_addr().unwrap().raw();
        vec![buffer.addr().raw(), SLOT as u64, credits, u64::from(acquire), stop, counts, nanoseconds(limit)]
    });
    let share = rounds.div_ceil(writers as u64);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (mapping, credits) = (&mapping, &credits);
            scope.spawn(move || write_slots(mapping, credits, writer, share, publish));
        }
    });
    let time = started.elapsed();
    let counts = reader.stop();
    let [checked, bytes, wrong_rounds, wrong_bytes] = [1, 2, 3, 4].map(|word| sum(&counts, word));
    let first = counts.iter().map(|warp| warp[5]).find(|&wrong| wrong != 0);
    let first = first.map_or_else(String::new, |wrong| {
        let [round, at] = [wrong >> 32, wrong >> 16 & 0xffff];
        format!(
            ", one of them in round {round}, byte {at}: {:#04x} instead of {:#04x}",
            wrong >> 8 & 0xff,
            wrong & 0xff
        )
    });
    println!(
        "{}: {checked} rounds by {writers} threads in {:.1} s ({:.2} million/s), {bytes} bytes; violations: {wrong_rounds} \
         rounds, {wrong_bytes} bytes{first}",
        if acquire { "ld.acquire.sys" } else { "ld.relaxed.sys, fence.acq_rel.sys" },
        time.as_secs_f64(),
        checked as f64 / time.as_secs_f64() / 1e6,
    );
    assert_eq!(checked, share * writers as u64, "rounds published and rounds checked");
    [checked, wrong_rounds]
}

#[test]
fn whoever_sees_the_flag_sees_the_data() {
    let Some(session) = session(None) else { return };
    let module = Module::load(0, PTX).unwrap();
    let rounds: u64 = from_env("GDRCOPY_SOAK_ROUNDS", 2_000_000);
    let (mut checked, mut wrong) = (0, 0);
    for acquire in [true, false] {
        let counts = order(&session, &module, acquire, rounds.div_ceil(2), |mapping, at, data, flag_at, flag| {
            mapping.publish(at, data, flag_at, flag).unwrap();
        });
        checked += counts[0];
        wrong += counts[1];
    }
    println!(
        "ordering soak: {checked} rounds of data then flag, sizes 1-256 and larger at offsets 0-63, {wrong} violations"
    );
    assert_eq!(wrong, 0);
}

/// The control: with the flag first, the reader must find old data behind it.
#[test]
fn a_flag_before_its_data_is_noticed() {
    let Some(session) = session(None) else { return };
    let module = Module::load(0, PTX).unwrap();
    for acquire in [true, false] {
        // The slower the reader is after the flag, the seldomer it comes before the data: as often as it takes.
        let [mut rounds, mut violations] = [0, 0];
        while violations == 0 {
            assert!(rounds < 20_000_000, "the reader cannot see data that came late");
            let counts = order(&session, &module, acquire, 500_000, |mapping, at, data, flag_at, flag| {
                mapping.store_u64(flag_at, flag).unwrap();
                mapping.write(at, data).unwrap();
            });
            rounds += counts[0];
            violations += counts[1];
        }
        println!("ordering control, flag first: {rounds} rounds, {violations} violations");
    }
}

#[test]
fn the_grid_is_complete_and_fits() {
    let cells: std::collections::BTreeSet<_> = (0..CELLS).map(cell).collect();
    assert_eq!(cells.len(), CELLS);
    assert!(cells.contains(&(1, 63)) && cells.contains(&(256, 0)) && cells.contains(&(4096, 63)));
    assert!(cells.iter().all(|(size, offset)| DATA_AT + offset + size <= SLOT));
}
