//! How long a message of 48 bytes takes from one end to the other while messages come at a rate.
//!
//! Message `n` is due at `n / rate` from the start, whether or not the sender keeps up, and what is measured begins when it
//! was due: a sender that falls behind is charged for it. 32 warps receive. Of the messages a sample is answered by a store
//! into host memory, which a second CPU polls; so what is measured is the way there and the way back, on one clock, the
//! time-stamp counter. The way back is not known on its own: it takes no longer than the shortest of all these times, and
//! half of that is subtracted, so that a figure is right within as much.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::channel::Sender;
use gdrcopy::tool::clock::Clock;
use gdrcopy::tool::cpu;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::host;
use gdrcopy::tool::interrupt;
use gdrcopy::tool::report::Metric;
use gdrcopy::tool::stats::{Samples, nanoseconds};

use super::far::{Far, Found, Kernel, Memory, PATIENCE, REPORT, Sm, answer_at, answer_bytes, message_of};
use super::rate::{mask, messages};
use super::{LINE_BYTES, PART, builder, every_cpu, head, keep};
use crate::lab::Lab;
use crate::report::Findings;

const READERS: u32 = 32;
const RING: u32 = 1 << 14;
const SLOTS: u64 = 1 << 12;
/// Samples that are looked for at a time: more than are ever on their way, unless the ring is full.
const WINDOW: u64 = 16;
/// The first message is due so long after everything is ready.
const LEAD: Duration = Duration::from_micros(200);
/// Binary places of messages per tick.
const FRACTION_BITS: u32 = 40;

/// Messages at a rate.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Messages a second.
    rate: u32,
    /// One message of 32 * 2^this is answered: up to about 300000 a second.
    every_log2: u32,
    /// SFENCE behind the last message that is due.
    commit: bool,
    host: bool,
}

const MILLION: u32 = 1_000_000;

fn cases(is_emulated: bool) -> Vec<Case> {
    let case = |(rate, every_log2), commit, host| Case { rate, every_log2, commit, host };
    if is_emulated {
        return vec![case((100_000, 0), true, false)];
    }
    let rates =
        [(MILLION / 10, 0), (MILLION, 0), (10 * MILLION, 0), (50 * MILLION, 3), (100 * MILLION, 4), (250 * MILLION, 5)];
    let ours = rates.into_iter().flat_map(|rate| [case(rate, true, false), case(rate, false, false)]);
    let rival = rates[1..4].iter().map(|&rate| case(rate, true, true));
    ours.chain(rival).collect()
}

impl Case {
    fn name(&self) -> String {
        let place = if self.host { "host" } else { "GPU" };
        let way = if self.commit { "seen off" } else { "posted" };
        let rate = f64::from(self.rate) / f64::from(MILLION);
        format!("{rate} million/s, {way}, ring in {place} memory")
    }
}

/// When messages are due.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    start: u64,
    /// With [`FRACTION_BITS`].
    per_tick: u64,
}

impl Schedule {
    fn new(clock: &Clock, rate: u32, start: u64) -> Self {
        // Ticks as powers of two: 2^30 of them take `ps`.
        let ps = u128::from(clock.ps(1 << 30));
        let per_tick = ((u128::from(rate) * ps) << (FRACTION_BITS - 30)) / 1_000_000_000_000;
        Self { start, per_tick: u64::try_from(per_tick).unwrap_or(u64::MAX).max(1) }
    }

    /// Messages that are due at `now`: number 0 at the start.
    #[inline(always)]
    fn due(&self, now: u64) -> u64 {
        match now.checked_sub(self.start) {
            None => 0,
            Some(ticks) => {
                let messages = (u128::from(ticks) * u128::from(self.per_tick)) >> FRACTION_BITS;
                u64::try_from(messages).unwrap_or(u64::MAX - 1) + 1
            }
        }
    }

    /// When message `number` is due.
    fn when(&self, number: u64) -> u64 {
        let ticks = (u128::from(number) << FRACTION_BITS).div_ceil(u128::from(self.per_tick));
        self.start + u64::try_from(ticks).unwrap_or(u64::MAX / 2)
    }
}

/// Sends `count` messages, each as soon as it is due and there is room.
fn send(
    clock: &Clock,
    sender: &mut Sender,
    schedule: Schedule,
    case: &Case,
    count: u64,
    messages: &[[u8; 48]],
) -> Result<(), Failure> {
    let (mut sent, mut uncommitted, mut progress) = (0_u64, false, Instant::now());
    let mut looks = 0_u32;
    while sent < count {
        let due = schedule.due(clock.start()).min(count);
        if due > sent {
            let at = usize::try_from(sent & mask()).unwrap_or(0);
            let most = usize::try_from(due - sent).unwrap_or(usize::MAX);
            let left = &messages[at..messages.len().min(at.saturating_add(most))];
            let taken = sender.try_send_lines(left).map_err(|error| Failure::run(error.to_string()))?;
            sent += u64::try_from(taken).unwrap_or(0);
            uncommitted |= taken > 0;
            looks = if taken > 0 { 0 } else { looks + 1 };
            if looks == 1 {
                progress = Instant::now();
            } else if looks.is_multiple_of(1 << 16) && progress.elapsed() > PATIENCE {
                return Err(Failure::run(format!("the kernel takes no more messages after {sent} of {count}")));
            }
        } else if uncommitted && case.commit {
            sender.commit();
            uncommitted = false;
        }
    }
    sender.commit();
    Ok(())
}

/// Waits for the answers and notes how long after its message was due each of them was seen.
fn collect(
    clock: &Clock,
    answers: &Memory,
    schedule: Schedule,
    every_log2: u32,
    samples: u64,
    is_over: &AtomicBool,
    times: &mut Vec<u64>,
) {
    // Samples from `base` on are looked for; of those, the ones with a bit set have been seen.
    let (mut base, mut seen, mut fruitless) = (0_u64, 0_u64, 0_u32);
    while base < samples {
        for ahead in 0..WINDOW.min(samples - base) {
            let sample = base + ahead;
            if seen >> ahead & 1 != 0 {
                continue;
            }
            let answer = answers.word(answer_at(sample, SLOTS)).load(Ordering::Acquire);
            if answer == (sample + 1) & 0xffff_ffff {
                let now = clock.stop().ticks;
                times.push(clock.ps(now.saturating_sub(schedule.when(message_of(sample, every_log2)))));
                seen |= 1 << ahead;
            }
        }
        let done = seen.trailing_ones();
        seen >>= done;
        base += u64::from(done);
        fruitless = if done > 0 { 0 } else { fruitless.saturating_add(1) };
        // The other end may have failed.
        if fruitless > 1 << 20 {
            if is_over.load(Ordering::Acquire) {
                break;
            }
            thread::yield_now();
        }
    }
}

/// What a case showed.
struct Outcome {
    /// There and back, in picoseconds.
    times: Vec<u64>,
    verified: bool,
    /// Of the rate asked for.
    kept_up: f64,
}

impl Outcome {
    /// The times less `ps` each.
    fn less(&self, ps: u64) -> Samples {
        let mut samples = Samples::new();
        self.times.iter().for_each(|&time| samples.record(time.saturating_sub(ps)));
        samples
    }
}

fn measure(lab: &Lab<'_>, far: &Far, case: &Case, other_cpu: u32, time: Duration) -> Result<Outcome, Failure> {
    let clock = lab.clock;
    let readers = if far.is_emulated() { 1 } else { READERS };
    // Whole blocks for every reader, and whole groups of samples.
    let unit = u64::from(32 * readers) << case.every_log2;
    let wanted = u128::from(case.rate) * time.as_nanos() / 1_000_000_000;
    let count = u64::try_from(wanted).unwrap_or(u64::MAX).next_multiple_of(unit).max(unit);
    let samples = (count / 32) >> case.every_log2;

    let answers = far.memory(answer_bytes(SLOTS))?;
    let report = far.memory(REPORT * 32)?;
    let messages = messages();
    let mut builder = builder(lab).lines_to_gpu(RING).readers(readers);
    if case.host {
        builder = builder.ring_in_host_memory();
    }
    let (mut sender, _receiver) = builder.open(&lab.rig.session)?;
    let every_log2 = case.every_log2;
    let kernel = Kernel::Arrive { count, mask: mask(), every_log2, answers: &answers, slots: SLOTS, report: &report };
    let running = far.start(kernel, Sm::Shared, &sender.device(), || sender.kernel_has_started())?;

    let (start, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let (sent, times, seconds) = thread::scope(|scope| {
        let collector = scope.spawn(|| {
            let is_placed = cpu::pin_to(other_cpu);
            // Touched now, so that no page is missing later.
            let mut times = vec![1; usize::try_from(samples).unwrap_or(0)];
            times.clear();
            // From now on this thread polls; its start is the schedule's.
            let lead = ticks_in(clock, LEAD);
            let schedule = Schedule::new(clock, case.rate, clock.start() + lead);
            start.store(schedule.start, Ordering::Release);
            collect(clock, &answers, schedule, every_log2, samples, &is_over, &mut times);
            is_placed.map(|()| times)
        });
        let begin = loop {
            match start.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                begin => break begin,
            }
        };
        let schedule = Schedule::new(clock, case.rate, begin);
        let sent = send(clock, &mut sender, schedule, case, count, &messages);
        let seconds = clock.ps(clock.stop().ticks.saturating_sub(begin));
        if sent.is_err() {
            is_over.store(true, Ordering::Release);
        }
        // Answers to what was sent come within a moment; a lost one would be waited for in vain.
        let sent_at = Instant::now();
        while !collector.is_finished() && sent_at.elapsed() < PATIENCE {
            thread::yield_now();
        }
        is_over.store(true, Ordering::Release);
        (sent, collector.join(), seconds)
    });
    if sent.is_err() {
        sender.stop();
    }
    running.finish()?;
    sent?;
    let times = times.map_err(|_| Failure::run("the thread that collects answers panicked"))??;
    let verified = Found::of(&report, readers).is_clean(count) && u64::try_from(times.len()) == Ok(samples);
    let asked =
        Duration::from_nanos(u64::try_from(u128::from(count) * 1_000_000_000 / u128::from(case.rate)).unwrap_or(0));
    let kept_up = asked.as_secs_f64() / (nanoseconds(seconds) / 1e9);
    Ok(Outcome { times, verified, kept_up })
}

fn ticks_in(clock: &Clock, time: Duration) -> u64 {
    let wanted = time.as_nanos() * 1000;
    let ps = u128::from(clock.ps(1 << 30)).max(1);
    u64::try_from((wanted << 30) / ps).unwrap_or(0)
}

/// How far apart the counters of this CPU and of `other` may be: the other's counter, read between two reads of ours, for
/// the shortest gap of many. What it is ahead, and the uncertainty.
fn skew(clock: &Clock, other: u32) -> Result<(i64, u64), Failure> {
    const EXCHANGES: u64 = 20_000;
    let (ask, answer) = (AtomicU64::new(0), AtomicU64::new(0));
    let best = thread::scope(|scope| {
        let there = scope.spawn(|| {
            cpu::pin_to(other)?;
            for n in 1..=EXCHANGES {
                while ask.load(Ordering::Acquire) != n {
                    std::hint::spin_loop();
                }
                answer.store(clock.start(), Ordering::Release);
            }
            Ok::<(), Failure>(())
        });
        let mut best = (u64::MAX, 0_i64);
        for n in 1..=EXCHANGES {
            let before = clock.start();
            answer.store(0, Ordering::Release);
            ask.store(n, Ordering::Release);
            let theirs = loop {
                match answer.load(Ordering::Acquire) {
                    0 if there.is_finished() => break None,
                    0 => std::hint::spin_loop(),
                    ticks => break Some(ticks),
                }
            };
            let after = clock.stop().ticks;
            let Some(theirs) = theirs else { break };
            let gap = after.saturating_sub(before);
            let ahead = theirs.wrapping_sub(before + gap / 2).cast_signed();
            best = best.min((gap, ahead));
        }
        there.join().map(|pinned| pinned.map(|()| best))
    });
    let (gap, ahead) = best.map_err(|_| Failure::run("the thread that reads the other counter panicked"))??;
    let ns = |ticks: u64| clock.ps(ticks) / 1000;
    let apart = i64::try_from(ns(ahead.unsigned_abs())).unwrap_or(i64::MAX);
    Ok((if ahead < 0 { -apart } else { apart }, ns(gap / 2)))
}

/// A CPU next to the GPU, or any other, that is not this one and that a thread may run on; not this one's neighbour either
/// if there are others, which may be its sibling.
fn other_cpu(lab: &Lab<'_>) -> Option<u32> {
    let here = cpu::current()?;
    let local = lab.rig.gpu.pci.and_then(|pci| host::local_cpus(&pci.to_string()));
    let mut cpus: Vec<u32> = local.or_else(every_cpu)?.iter().filter(|&cpu| cpu != here).collect();
    // The last are the least likely to serve interrupts.
    cpus.reverse();
    cpus.sort_by_key(|cpu| cpu.abs_diff(here) < 2);
    let is_usable = |cpu| thread::spawn(move || cpu::pin_to(cpu).is_ok()).join().unwrap_or(false);
    cpus.into_iter().find(|&cpu| is_usable(cpu))
}

pub(super) fn run(lab: &Lab<'_>, far: &Far, found: &mut Findings) -> Result<(), Failure> {
    let Some(other) = other_cpu(lab) else {
        return found.skip(lab.screen, PART, "one-way latency needs a second CPU next to the GPU".to_owned());
    };
    let (ahead, within) = match skew(lab.clock, other) {
        Ok(skew) => skew,
        Err(failure) => {
            return found.skip(lab.screen, PART, format!("one-way latency needs a second CPU: {failure}"));
        }
    };
    let time = if far.is_emulated() { Duration::from_millis(100) } else { Duration::from_secs(1) };
    let time = time * lab.pace.times(20) / 20;
    let mut outcomes = Vec::new();
    for case in cases(far.is_emulated()) {
        interrupt::check()?;
        outcomes.push((case, measure(lab, far, &case, other, time)?));
    }
    // The shortest way there and back of all.
    let shortest = outcomes.iter().flat_map(|(_, outcome)| outcome.times.iter().copied()).min().unwrap_or(0);
    let half = shortest / 2;
    head(lab, "One way, 48 B messages at a rate, from when a message was due until a kernel had it")?;
    for (case, outcome) in &outcomes {
        let method = case.name();
        keep(lab, found, (Metric::GpuVisible, LINE_BYTES), &method, &outcome.less(half), outcome.verified)?;
        if outcome.kept_up < 0.99 {
            let share = 100.0 * outcome.kept_up;
            lab.screen
                .line(&format!("    the sender kept up with {share:.0} % of that rate: the times grew with the run"))?;
        }
    }
    lab.screen.line(&format!(
        "  less {:.0} ns for the way back, half of the shortest way there and back; right within as much either way",
        nanoseconds(half)
    ))?;
    lab.screen.line(&format!(
        "  sent by one CPU, answers seen by CPU {other}, whose counter is {ahead} ns ahead, known to within {within} ns"
    ))
}
