//! Round trips: 48 bytes each way, and 512 in and 4 out; alone, and with every SM busy but the one that the kernel has.

use std::time::Instant;

use gdrcopy::channel::{ChannelBuilder, ChannelError, Mailbox, Receiver, Sender};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::interrupt;
use gdrcopy::tool::load::Load;
use gdrcopy::tool::report::Metric;
use gdrcopy::tool::stats::Samples;
use gdrcopy::{Session, copy};

use super::far::{Far, Found, Kernel, Memory, PATIENCE, REPORT, Sm, request_of};
use super::{LIMIT, LINE_BYTES, PART, builder, exactly, head, keep, median};
use crate::lab::Lab;
use crate::report::{Findings, Target};

/// Every way is measured so many times, in turn, each time on a channel and with a kernel of its own.
const TURNS: u32 = 5;
/// Calls of a turn, of which the first are not timed.
const CALLS: u32 = 40_000;
const WARM: u32 = 1_000;

/// How a message goes and its answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// [`Mailbox::call`].
    Call,
    /// The same with another routine for the line.
    Routine(&'static str),
    /// [`Sender::try_send_line`] and [`Receiver::try_recv_line`], nothing behind the line.
    Bare,
    /// [`Mailbox::call`], the kernel's warp beside others on its SM.
    Beside,
    /// The rival: the kernel polls host memory.
    Host,
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::Call => "call, ring in GPU memory".to_owned(),
            Self::Routine(name) => format!("the same, line stored by {name}"),
            Self::Bare => "line sent, no SFENCE behind it".to_owned(),
            Self::Beside => "call, SM shared with the load".to_owned(),
            Self::Host => "call, ring in host memory".to_owned(),
        }
    }
}

/// What goes and what comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Payload {
    Line,
    Request,
}

impl Payload {
    fn bytes(self) -> u64 {
        match self {
            Self::Line => LINE_BYTES,
            Self::Request => 512,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Line => "Round trips, 48 B in and 48 B out",
            Self::Request => "Round trips, 512 B in and 4 B out",
        }
    }

    /// Targets: the median [us], and the 99th percentile over the median; alone and beside load.
    fn targets(self) -> (f64, [&'static str; 4]) {
        match self {
            Self::Line => (
                1.65,
                [
                    "round trip 48 B in, 48 B out, p50",
                    "round trip 48 B in, 48 B out, p99 / p50",
                    "the same, every other SM busy, p50 (48 B)",
                    "the same, every other SM busy, p99 / p50 (48 B)",
                ],
            ),
            Self::Request => (
                1.72,
                [
                    "round trip 512 B in, 4 B out, p50",
                    "round trip 512 B in, 4 B out, p99 / p50",
                    "the same, every other SM busy, p50 (512 B)",
                    "the same, every other SM busy, p99 / p50 (512 B)",
                ],
            ),
        }
    }
}

/// The near end, ready to be called.
enum Near {
    Line(Mailbox<[u32; 12], [u32; 12]>),
    Request(Mailbox<[u32; 128], u32>, Memory),
    Bare(Sender, Receiver),
}

/// A channel that is open before the load starts, as freeing and allocating would wait for it.
struct Prepared {
    near: Near,
    sm: Sm,
}

fn open(lab: &Lab<'_>, far: &Far, session: &Session, way: Way, payload: Payload) -> Result<Prepared, Failure> {
    // As short as it can be, for it is near then: there is one message at a time.
    let mut builder: ChannelBuilder = builder(lab).lines_to_gpu(32);
    if way == Way::Host {
        builder = builder.ring_in_host_memory();
    }
    let (sender, receiver) = builder.open(session)?;
    let near = match (way, payload) {
        (Way::Bare, _) => Near::Bare(sender, receiver),
        (_, Payload::Line) => Near::Line(Mailbox::new(sender, receiver)?),
        (_, Payload::Request) => Near::Request(Mailbox::new(sender, receiver)?, far.memory(REPORT)?),
    };
    let sm = if way == Way::Beside { Sm::Shared } else { Sm::Own };
    Ok(Prepared { near, sm })
}

fn failed(error: &ChannelError) -> Failure {
    Failure::run(error.to_string())
}

/// The line of call `n`.
fn line_of(n: u32) -> [u32; 12] {
    let mut at = 0;
    [(); 12].map(|()| {
        at += 1;
        n.wrapping_mul(0x0101_0101) ^ at << 24
    })
}

/// [`line_of`], as bytes.
fn bytes_of(line: [u32; 12]) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes.as_chunks_mut::<4>().0.iter_mut().zip(line).for_each(|(to, word)| *to = word.to_le_bytes());
    bytes
}

impl Prepared {
    /// Starts the kernel, keeps the GPU busy if there is a load, and makes the calls of a turn. Whether every answer was right.
    fn turn(
        &mut self,
        lab: &Lab<'_>,
        far: &Far,
        load: Option<&Load>,
        calls: u32,
        samples: &mut Samples,
    ) -> Result<bool, Failure> {
        let sm = self.sm;
        let running = match &self.near {
            Near::Line(mailbox) => far.start(Kernel::Echo, sm, &mailbox.device(), || mailbox.kernel_has_started())?,
            Near::Request(mailbox, report) => {
                far.start(Kernel::Ask { report }, sm, &mailbox.device(), || mailbox.kernel_has_started())?
            }
            Near::Bare(sender, _) => far.start(Kernel::Echo, sm, &sender.device(), || sender.kernel_has_started())?,
        };
        let loading = load.map(|load| load.start(LIMIT)).transpose()?;
        let mut right = true;
        for n in 0..calls {
            let (ps, is_right) = self.call(lab, n)?;
            right &= is_right;
            if n >= WARM.min(calls / 2) {
                samples.record(ps);
            }
        }
        if let Some(loading) = &loading
            && !loading.still_runs()?
        {
            return Err(Failure::run("the load ended before the measurement"));
        }
        drop(loading);
        match &self.near {
            Near::Line(mailbox) => mailbox.stop(),
            Near::Request(mailbox, _) => mailbox.stop(),
            Near::Bare(sender, _) => sender.stop(),
        }
        running.finish()?;
        if let Near::Request(_, report) = &self.near {
            right &= Found::of(report, 1).is_clean(u64::from(calls));
        }
        Ok(right)
    }

    /// Call `n`: what it took in picoseconds, and whether the answer was right.
    #[inline(always)]
    fn call(&mut self, lab: &Lab<'_>, n: u32) -> Result<(u64, bool), Failure> {
        let clock = lab.clock;
        let (ticks, is_right) = match &mut self.near {
            Near::Line(mailbox) => {
                let line = line_of(n);
                let start = clock.start();
                let answer = mailbox.call(&line, PATIENCE).map_err(|error| failed(&error))?;
                (clock.stop().ticks.saturating_sub(start), answer == line.map(|word| !word))
            }
            Near::Request(mailbox, _) => {
                let request = request_of(n);
                let start = clock.start();
                let answer = mailbox.call(&request, PATIENCE).map_err(|error| failed(&error))?;
                (clock.stop().ticks.saturating_sub(start), answer == request[0] ^ request[127])
            }
            Near::Bare(sender, receiver) => {
                let line = line_of(n);
                let payload = bytes_of(line);
                let start = clock.start();
                sender.try_send_line(&payload).map_err(|error| failed(&error))?;
                let answer = receiver.recv_line(PATIENCE).map_err(|error| failed(&error))?;
                let ticks = clock.stop().ticks.saturating_sub(start);
                (ticks, answer == bytes_of(line.map(|word| !word)))
            }
        };
        Ok((clock.ps(ticks).saturating_sub(clock.overhead_ps()), is_right))
    }
}

/// The host's own hiccups: waits of `ps` by the clock, for nobody.
fn hiccups(lab: &Lab<'_>, ps: u64, count: u32, samples: &mut Samples) {
    let clock = lab.clock;
    for _ in 0..count {
        let start = clock.start();
        let taken = loop {
            let taken = clock.ps(clock.stop().ticks.saturating_sub(start));
            if taken >= ps {
                break taken;
            }
        };
        samples.record(taken.saturating_sub(clock.overhead_ps()));
    }
}

/// Routines other than the session's that store a whole line.
fn others(own: &str) -> impl Iterator<Item = &'static str> {
    let whole = copy::routines().iter().filter(|routine| ["avx512", "movdir64b"].contains(&routine.name()));
    whole.filter(move |routine| routine.is_available() && routine.name() != own).map(|routine| routine.name())
}

pub(super) fn run(lab: &Lab<'_>, far: &Far, found: &mut Findings) -> Result<(), Failure> {
    let load = match far.is_emulated() {
        true => None,
        false => Some(Load::new(&lab.rig.session, lab.rig.gpu.ordinal)?),
    };
    for payload in [Payload::Line, Payload::Request] {
        measure(lab, far, payload, None, found)?;
        if load.is_some() {
            measure(lab, far, payload, load.as_ref(), found)?;
        }
    }
    Ok(())
}

fn measure(
    lab: &Lab<'_>,
    far: &Far,
    payload: Payload,
    load: Option<&Load>,
    found: &mut Findings,
) -> Result<(), Failure> {
    let mut ways = vec![Way::Call, Way::Host];
    if payload == Payload::Line {
        ways.push(Way::Bare);
    }
    if load.is_some() {
        ways.push(Way::Beside);
    }
    if !far.is_emulated() {
        ways.extend(others(lab.mapping.routine().name()).map(Way::Routine));
    }
    let calls = if far.is_emulated() { 200 } else { lab.pace.times(CALLS) };
    let mut sessions = Vec::new();
    for &way in &ways {
        sessions.push(match way {
            Way::Routine(name) => Session::builder().backend(lab.backend()).copy_routine(name).open()?,
            _ => lab.rig.session.clone(),
        });
    }
    let mut prepared = Vec::new();
    for _ in 0..TURNS {
        for (&way, session) in ways.iter().zip(&sessions) {
            prepared.push(open(lab, far, session, way, payload)?);
        }
    }
    let mut samples = vec![Samples::new(); ways.len()];
    let (mut alone, mut right) = (Samples::new(), vec![true; ways.len()]);
    let begin = Instant::now();
    for turn in prepared.chunks_mut(ways.len()) {
        interrupt::check()?;
        for ((channel, samples), right) in turn.iter_mut().zip(&mut samples).zip(&mut right) {
            *right &= channel.turn(lab, far, load, calls, samples)?;
        }
        let wait = samples[0].quantile(0.5);
        hiccups(lab, wait, calls, &mut alone);
    }
    let beside = match load {
        Some(_) => format!(" (beside {}; the kernel's warp has an SM to itself)", Load::describe()),
        None => String::new(),
    };
    head(lab, &format!("{}{beside}, {:.1} s", payload.title(), begin.elapsed().as_secs_f64()))?;
    let suffix = if load.is_some() { ", SMs busy" } else { "" };
    for ((way, samples), right) in ways.iter().zip(&samples).zip(right) {
        let method = format!("{}{suffix}", way.name());
        keep(lab, found, (Metric::Rtt, payload.bytes()), &method, samples, right)?;
    }
    keep(lab, found, (Metric::Rtt, payload.bytes()), &format!("host alone, waiting as long{suffix}"), &alone, true)?;

    let (limit, names) = payload.targets();
    let [at_median, at_tail] = if load.is_some() { [names[2], names[3]] } else { [names[0], names[1]] };
    let us = |ns: f64| ns / 1000.0;
    let p50 = median(&samples[0]);
    let d = samples[0].distribution();
    let tails = format!(
        "p99.9 {:.1} us, the host alone {:.1}; ring in host memory p50 {:.2} us",
        us(d.p999),
        us(alone.distribution().p999),
        us(samples[1].distribution().p50)
    );
    found.judge(PART, at_median, Target::AtMost(limit), "us", p50.map(us), tails);
    let ratio = exactly(d.p99 / d.p50);
    found.judge(PART, at_tail, Target::AtMost(1.1), "x", ratio, format!("p99 {:.2} us", us(d.p99)));
    Ok(())
}
