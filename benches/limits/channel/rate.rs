//! Messages of 48 bytes one way as fast as they go: from one core to 32 warps, beside the rival, and from one warp to one
//! core. Every message is checked at the other end.

use std::time::Instant;

use gdrcopy::channel::{ChannelError, Receiver, Sender};
use gdrcopy::tool::ab::Estimate;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::{Direction, Metric};

use super::far::{Far, Found, Kernel, PATIENCE, REPORT, Sm, payload_of};
use super::{LINE_BYTES, PART, builder};
use crate::lab::Lab;
use crate::report::{Figure, Findings, Place, Target};

/// Messages that are sent again and again, so that what is measured is the ring and not the making of messages.
const DIFFERENT: usize = 1024;
const RING: u32 = 1 << 14;
const TURNS: u32 = 5;

/// Sends `count` messages, as many at a time as there is room for.
pub(super) fn flood(sender: &mut Sender, messages: &[[u8; 48]], count: u64) -> Result<(), Failure> {
    let failed = |error: ChannelError| Failure::run(error.to_string());
    let all = u64::try_from(messages.len()).unwrap_or(u64::MAX);
    let mut sent = 0;
    while sent < count {
        let at = usize::try_from(sent % all).unwrap_or(0);
        let most = usize::try_from(count - sent).unwrap_or(usize::MAX);
        let left = &messages[at..messages.len().min(at.saturating_add(most))];
        let taken = sender.try_send_lines(left).map_err(failed)?;
        if taken == 0 {
            // Waits, for a limited time.
            sender.send_line(&left[0], PATIENCE).map_err(failed)?;
        }
        sent += u64::try_from(taken.max(1)).unwrap_or(0);
    }
    sender.commit();
    Ok(())
}

/// The messages of [`flood`]: number `n` is made as `n` modulo their count.
pub(super) fn messages() -> Vec<[u8; 48]> {
    (0..).take(DIFFERENT).map(payload_of).collect()
}

pub(super) fn mask() -> u64 {
    u64::try_from(DIFFERENT - 1).unwrap_or(0)
}

/// What turns found: seconds for `count` messages each.
struct Turns {
    seconds: Vec<f64>,
    count: u32,
    verified: bool,
}

impl Turns {
    fn new(count: u32) -> Self {
        Self { seconds: Vec::new(), count, verified: true }
    }

    fn rate(&self, seconds: f64) -> f64 {
        f64::from(self.count) / seconds / 1e6
    }

    /// The median turn's rate in million/s; the slowest and the fastest are its interval.
    fn estimate(&self) -> Estimate {
        let mut sorted = self.seconds.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let [slow, middle, fast] =
            [sorted.last(), sorted.get(sorted.len() / 2), sorted.first()].map(|s| s.copied().unwrap_or(f64::NAN));
        Estimate { value: self.rate(middle), low: self.rate(slow), high: self.rate(fast) }
    }

    fn keep(
        &self,
        lab: &Lab<'_>,
        found: &mut Findings,
        direction: Direction,
        method: &str,
    ) -> Result<Estimate, Failure> {
        let rate = self.estimate();
        let ns = rate.map(|rate| 1000.0 / rate);
        let turns = self.seconds.len();
        found.results.push(Figure {
            place: Place { part: PART, direction, metric: Metric::Sustained, bytes: LINE_BYTES },
            method: method.to_owned(),
            min_ns: ns.low,
            p50_ns: ns.value,
            p50_low_ns: ns.low,
            p50_high_ns: ns.high,
            p99_ns: ns.high,
            p999_ns: ns.high,
            max_ns: ns.high,
            rounds: turns,
            iterations: u64::from(self.count) * u64::try_from(turns).unwrap_or(0),
            verified: self.verified,
        });
        let note = if self.verified { "" } else { "  WRONG MESSAGES" };
        lab.screen.line(&format!(
            "  {method:<46}{:>9.1}{:>9.1}{:>9.1}{:>12}{note}",
            rate.value, rate.low, rate.high, self.count
        ))?;
        Ok(rate)
    }
}

/// One turn of messages to the GPU: seconds, and whether each arrived as it should.
fn to_gpu(lab: &Lab<'_>, far: &Far, host: bool, count: u64, messages: &[[u8; 48]]) -> Result<(f64, bool), Failure> {
    let readers = if far.is_emulated() { 1 } else { 32 };
    let mut builder = builder(lab).lines_to_gpu(RING).readers(readers);
    if host {
        builder = builder.ring_in_host_memory();
    }
    let report = far.memory(REPORT * 32)?;
    let (mut sender, _receiver) = builder.open(&lab.rig.session)?;
    let kernel = Kernel::Soak { count, mask: mask(), report: &report };
    let running = far.start(kernel, Sm::Shared, &sender.device(), || sender.kernel_has_started())?;
    let begin = Instant::now();
    let sent = flood(&mut sender, messages, count);
    let seconds = begin.elapsed().as_secs_f64();
    if sent.is_err() {
        sender.stop();
    }
    running.finish()?;
    sent?;
    Ok((seconds, Found::of(&report, readers).is_clean(count)))
}

/// One turn of messages to this core.
fn to_host(lab: &Lab<'_>, far: &Far, count: u64) -> Result<(f64, bool), Failure> {
    let (sender, mut receiver): (Sender, Receiver) = builder(lab).lines_to_host(RING).open(&lab.rig.session)?;
    let running = far.start(Kernel::Pour { count }, Sm::Own, &sender.device(), || sender.kernel_has_started())?;
    let begin = Instant::now();
    let mut right = true;
    let received = (0..count).try_for_each(|number| -> Result<(), Failure> {
        let line = receiver.recv_line(PATIENCE).map_err(|error| Failure::run(error.to_string()))?;
        right &= line == payload_of(number);
        Ok(())
    });
    let seconds = begin.elapsed().as_secs_f64();
    sender.stop();
    running.finish()?;
    received?;
    Ok((seconds, right))
}

pub(super) fn run(lab: &Lab<'_>, far: &Far, found: &mut Findings) -> Result<(), Failure> {
    let messages = messages();
    // Whole blocks of 32 for each of 32 readers; some 0.4 s a turn.
    let [ours, rivals, back] = match far.is_emulated() {
        true => [10_240; 3],
        false => [100_000, 30_000, 10_000].map(|blocks| lab.pace.times(blocks) * 1024),
    };
    let mut turns = [Turns::new(ours), Turns::new(rivals), Turns::new(back)];
    for _ in 0..TURNS {
        let measured = [
            to_gpu(lab, far, false, u64::from(ours), &messages)?,
            to_gpu(lab, far, true, u64::from(rivals), &messages)?,
            to_host(lab, far, u64::from(back))?,
        ];
        for (turn, (seconds, right)) in turns.iter_mut().zip(measured) {
            turn.seconds.push(seconds);
            turn.verified &= right;
        }
    }
    lab.screen.line("")?;
    lab.screen.line(&format!(
        "Messages of 48 B one way, each checked at the other end, {TURNS} turns\n  {:<46}{:>9}{:>9}{:>9}{:>12}",
        "[million/s]", "median", "slowest", "fastest", "a turn"
    ))?;
    let [ours, rival, back] = &turns;
    let rate = ours.keep(lab, found, Direction::HostToDevice, "one core to 32 warps, ring in GPU memory")?;
    let other = rival.keep(lab, found, Direction::HostToDevice, "one core to 32 warps, ring in host memory")?;
    back.keep(lab, found, Direction::DeviceToHost, "one warp to one core, ring in host memory")?;
    let detail = format!("ring in host memory {:.0}", other.value);
    found.judge(PART, "48 B messages one way from one core", Target::AtLeast(250.0), "million/s", rate, detail);
    Ok(())
}
