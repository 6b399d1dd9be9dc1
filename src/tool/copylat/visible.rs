//! When the GPU sees a write: a kernel polls a flag and answers.

use std::cell::RefCell;
use std::time::Duration;

use super::Plan;
use crate::buffer::DeviceBuffer;
use crate::error::{Error, ErrorKind, Result};
use crate::mapping::Mapping;
use crate::tool::bench::{Bench, Loops};
use crate::tool::echo::{Echo, EchoSide, FLAG_BYTES};
use crate::tool::fail::Failure;
use crate::tool::interrupt;
use crate::tool::measure::Amount;
use crate::tool::method::{Bar1, Method};
use crate::tool::report::{Direction, Entry, Metric};
use crate::tool::rig::Rig;
use crate::tool::series::Series;
use crate::tool::table::Times;

/// Round trips of a bare flag, and how long they may take.
const BARE: u64 = 10_000;
const BARE_TIME: Duration = Duration::from_millis(200);

/// What an echo needs: a kernel, and memory for its flag.
#[derive(Debug)]
pub(super) struct Listener {
    side: EchoSide,
    flag: DeviceBuffer,
}

impl Listener {
    /// Loads the kernel. Call it before the thread is kept on a CPU: what plays an emulated GPU's part takes another.
    pub(super) fn new(rig: &Rig) -> Result<Self, Failure> {
        let gpu = (!rig.is_emulated()).then_some(rig.gpu.ordinal);
        let flag = rig.session.alloc_as(rig.gpu.ordinal, FLAG_BYTES, rig.buffer.allocator())?;
        Ok(Self { side: EchoSide::new(gpu)?, flag })
    }
}

/// A write through the mapping, then a flag, then the wait for a kernel's answer.
struct Visible<'a> {
    mapping: &'a Mapping<'a>,
    echo: RefCell<Echo<'a>>,
    /// Half of a bare flag's round trip.
    way_back_ns: f64,
    failure: RefCell<Option<Failure>>,
}

impl Visible<'_> {
    #[inline(always)]
    fn round_trip(&self) -> Result<()> {
        self.echo.borrow_mut().round_trip().map_err(|failure| {
            self.failure.replace(Some(failure));
            Error::new("echo", ErrorKind::Busy, "no answer")
        })
    }

    /// What the echo said, rather than what became of it on the way.
    fn told<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        outcome.map_err(|failure| self.failure.take().unwrap_or(failure))
    }
}

impl Method for Visible<'_> {
    fn name(&self) -> &'static str {
        Bar1::NAME
    }

    fn deducted_ns(&self) -> f64 {
        self.way_back_ns
    }

    fn describe(&self, _: Direction) -> &'static str {
        "Mapping::write, then a flag that a kernel polls and answers"
    }

    fn singles(&self, _: Direction) -> &'static [Metric] {
        &[Metric::GpuVisible]
    }

    #[inline(always)]
    fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.mapping.write(offset, from)?;
        self.round_trip()
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.mapping.read(offset, to)
    }

    fn settle(&self) -> Result<()> {
        self.mapping.flush()
    }
}

/// The table of writes until the GPU has seen them.
pub(super) fn table(
    (plan, rig, listener): (&Plan, &Rig, &Listener),
    mapping: &Mapping<'_>,
    series: &mut Series<'_>,
    bench: &mut Bench<'_>,
    arena: &mut [u8],
    results: &mut Vec<Entry>,
) -> Result<(), Failure> {
    let pinned = rig.session.pin(&listener.flag)?;
    let flag = pinned.map()?;
    let echo = listener.side.open(&flag, 0)?;
    let mut visible = Visible { mapping, echo: RefCell::new(echo), way_back_ns: 0.0, failure: RefCell::new(None) };

    let amount = Amount::UpTo(BARE, BARE_TIME);
    let bare = bench.sampler.warm_up(amount, || visible.round_trip()).map_err(Failure::from);
    let bare = bare.and_then(|_| {
        let bare = bench.sampler.single(amount, &mut (), |()| (), |()| visible.round_trip())?;
        interrupt::check()?;
        Ok(bare.samples.distribution().p50)
    });
    visible.way_back_ns = visible.told(bare)? / 2.0;

    let layout =
        Times { offsets: plan.has_offsets, sustained: false, singles: visible.singles(Direction::HostToDevice) };
    let heading = format!(
        "Host to device: {}\nless {:.1} ns for the answer's way: half of a bare flag's round trip, p50",
        visible.describe(Direction::HostToDevice),
        visible.way_back_ns
    );
    series.heading(&heading, &layout)?;
    bench.set_loops(Loops::Single);
    let rows = series.rows(bench, (&visible, Direction::HostToDevice), &layout, arena, results);
    bench.set_loops(plan.terms.loops);
    visible.told(rows)?;
    visible.echo.into_inner().close()
}
