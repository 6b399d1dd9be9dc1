//! What matrix products lose to an agent that stays and is asked for something all the time.
//!
//! Spans with and without the agent take turns while one product follows the other. The GPU notes when each is finished,
//! so that a span is a whole number of products by the GPU's own clock: the one during which the agent came or went is
//! left out.

use std::time::{Duration, Instant};

use gdrcopy::agent::{AgentOptions, HostBuffer, PushAgent, Segment};
use gdrcopy::tool::ab::{Estimate, Rounds};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::load::{Load, Loading, Product};
use gdrcopy::tool::report::{Direction, Metric};

use super::{LOAD_LIMIT, PART};
use crate::lab::Lab;
use crate::report::{Findings, Place, Target};

/// Products of a span take so long, or a little longer.
const SPAN: Duration = Duration::from_millis(200);
const TURNS: u32 = 12;
/// What a read asks for.
const BYTES: usize = 4096;
/// Without a request for so long the agent's kernel leaves: longer than a host's hiccup.
const IDLE: Duration = Duration::from_millis(5);
/// Spans that are taken again because a hiccup was longer.
const TRIES: usize = 5;
/// For a span, whatever happens.
const PATIENCE: Duration = Duration::from_secs(20);

/// The arms: the last is the noise floor.
const ARMS: [Arm; 3] = [Arm::Served, Arm::Absent, Arm::Absent];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// The agent's kernel is on the GPU and has always something to do.
    Served,
    /// It is not there.
    Absent,
}

pub(super) fn run(lab: &Lab<'_>, found: &mut Findings, load: &Load) -> Result<(), Failure> {
    let options = AgentOptions::default().gpu(lab.rig.gpu.ordinal).idle_timeout(Some(IDLE)).residency(None);
    // It may have to wait for blocks of a product to end.
    let options = options.deadline(Duration::from_secs(5));
    let mut agent = PushAgent::start(&lab.rig.session, [&lab.rig.buffer], options)?;
    let mut buffer = agent.host_buffer(BYTES)?;
    let loading = load.start(LOAD_LIMIT)?;
    let outcome = measure(lab, found, &mut Beside { agent: &mut agent, buffer: &mut buffer, loading: &loading });
    // Before the agent frees its memory, which would wait for the products.
    drop(loading);
    outcome
}

fn measure(lab: &Lab<'_>, found: &mut Findings, beside: &mut Beside<'_, '_>) -> Result<(), Failure> {
    let mut times = vec![Vec::new(); ARMS.len()];
    let (mut reads, mut time) = (0.0, Duration::ZERO);
    for turn in 0..usize::try_from(lab.pace.times(TURNS)).unwrap_or(1) {
        for place in 0..ARMS.len() {
            let index = (turn + place) % ARMS.len();
            let again = || Failure::run("the agent came or went in every span: this host stops for longer than 5 ms");
            let span = (0..TRIES).find_map(|_| beside.span(ARMS[index]).transpose()).ok_or_else(again)??;
            times[index].push(span.per_product.as_secs_f64() * 1e9);
            if ARMS[index] == Arm::Served {
                reads += span.reads;
                time += span.time;
            }
        }
    }
    let rounds = Rounds::of(times);
    let lost = |over: usize, arm: usize| rounds.bootstrap(|median| 100.0 * (1.0 - median(over) / median(arm)));
    let (loss, noise) = (lost(1, 0), lost(1, 2));
    let side = f64::from(u32::try_from(beside.product()?.side()).unwrap_or(0));
    let ms = |arm: usize| rounds.median(arm).map(|ns| ns / 1e6);
    let rate = |ms: Estimate| ms.map(|ms| 1000.0 / ms);
    let (with, without) = (ms(0), ms(1));
    let served = reads / time.as_secs_f64();
    lab.screen.line("")?;
    lab.screen.line(&format!(
        "Matrix products of {side} x {side}, FP32, one launch behind the other, {} turns",
        rounds.len()
    ))?;
    let tera = without.map(|ms| 2.0 * side.powi(3) / ms / 1e9);
    lab.screen.line(&format!("  without an agent        {:.3} products/s, {tera:.1} TFLOPS", rate(without)))?;
    lab.screen.line(&format!(
        "  beside one that serves  {:.3} products/s, {served:.0} reads of {BYTES} B a second",
        rate(with)
    ))?;
    lab.screen.line(&format!("  loss {loss:.3} %; without an agent twice {noise:.3} %"))?;
    let detail = format!("{served:.0} reads of {BYTES} B a second meanwhile; noise floor {noise:.2} %");
    let target = "matrix products lost beside an agent at full rate";
    found.judge(PART, target, Target::AtMost(1.0), "%", loss, detail);
    let bytes = u64::try_from(BYTES).unwrap_or(0);
    let place = Place { part: PART, direction: Direction::DeviceToHost, metric: Metric::Sustained, bytes };
    let (alone, served) = ("matrix product", "matrix product beside the agent");
    found.compare(place, served, alone, rounds.ratio(0, 1));
    found.compare(place, alone, alone, rounds.ratio(2, 1));
    Ok(())
}

/// The agent and what it runs beside.
struct Beside<'b, 'a> {
    agent: &'b mut PushAgent<'a>,
    buffer: &'b mut HostBuffer,
    loading: &'b Loading<'b>,
}

/// What a span found.
struct Span {
    per_product: Duration,
    /// Reads of the agent, and how long it took for them.
    reads: f64,
    time: Duration,
}

impl Beside<'_, '_> {
    fn product(&self) -> Result<&Product, Failure> {
        self.loading.product().ok_or_else(|| Failure::run("the load counts no products"))
    }

    fn read(&mut self) -> Result<(), Failure> {
        Ok(self.agent.read_into(self.buffer, &[Segment { range: 0, offset: 0, bytes: BYTES, at: 0 }])?)
    }

    /// One span; `None` if the agent came or went meanwhile.
    fn span(&mut self, arm: Arm) -> Result<Option<Span>, Failure> {
        let begin = Instant::now();
        match arm {
            Arm::Served => self.read()?,
            Arm::Absent => {
                while self.agent.is_resident() {
                    check(begin, self.loading)?;
                }
                // It has announced that it leaves, and does so within microseconds.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let launches = self.agent.launches();
        // The product that runs now has seen both.
        let first = self.product()?.finished();
        let (started, mut reads) = (Instant::now(), 0.0);
        let per_product = loop {
            match arm {
                Arm::Served => {
                    self.read()?;
                    reads += 1.0;
                }
                Arm::Absent => std::thread::sleep(Duration::from_millis(1)),
            }
            if let Some(per_product) = since(self.product()?, first) {
                break per_product;
            }
            check(begin, self.loading)?;
        };
        let time = started.elapsed();
        let is_whole = self.agent.launches() == launches && self.agent.is_resident() == (arm == Arm::Served);
        Ok(is_whole.then_some(Span { per_product, reads, time }))
    }
}

/// What a product took, of those that followed number `first`, once they fill a span.
fn since(product: &Product, first: u64) -> Option<Duration> {
    let finished = product.finished();
    let count = finished.checked_sub(first + 1).filter(|&count| count >= 2)?;
    let time = product.finished_at(finished - 1)?.checked_sub(product.finished_at(first)?)?;
    (time >= SPAN).then(|| time / u32::try_from(count).unwrap_or(u32::MAX))
}

fn check(begin: Instant, loading: &Loading<'_>) -> Result<(), Failure> {
    if !loading.still_runs()? {
        return Err(Failure::run("the matrix products ended before the measurement"));
    }
    if begin.elapsed() > PATIENCE {
        return Err(Failure::run(format!("no two matrix products within {} s", PATIENCE.as_secs())));
    }
    Ok(())
}
