//! The push agent beside every other way of copying: alone, beside matrix products, and what these lose by it.
//!
//! Times are of single calls, taken one by one in interleaved blocks, because the tail is half of what is asked. Beside each
//! is the host alone: the same loop, waiting by the clock for as long, so that a tail can be told from the host's.

use std::time::Duration;

use gdrcopy::BackendKind;
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::load::Load;
use gdrcopy::tool::method::{Bar1, CudaMemcpy, HostSide, Parallel};
use gdrcopy::tool::report::{Direction, Metric};

use self::times::Times;
use self::ways::{Host, Measured, Stand, Way};
use crate::lab::Lab;
use crate::report::{Figure, Findings, Place, Target};

mod products;
mod times;
mod ways;

const PART: &str = "agent";

/// Longer than the part takes.
const LOAD_LIMIT: Duration = Duration::from_secs(300);

/// A size, and what it should take.
struct Row {
    bytes: usize,
    limit: Option<Limit>,
}

struct Limit {
    target: &'static str,
    us: f64,
    tail: Option<&'static str>,
}

const fn row(bytes: usize, target: &'static str, us: f64, tail: Option<&'static str>) -> Row {
    Row { bytes, limit: Some(Limit { target, us, tail }) }
}

const fn unlimited(bytes: usize) -> Row {
    Row { bytes, limit: None }
}

const READS: [Row; 6] = [
    unlimited(64),
    row(4 << 10, "agent D2H 4 KiB, p50", 2.4, Some("agent D2H 4 KiB, p99 / p50")),
    row(16 << 10, "agent D2H 16 KiB, p50", 2.75, Some("agent D2H 16 KiB, p99 / p50")),
    row(64 << 10, "agent D2H 64 KiB, p50", 4.0, Some("agent D2H 64 KiB, p99 / p50")),
    row(256 << 10, "agent D2H 256 KiB, p50", 8.9, Some("agent D2H 256 KiB, p99 / p50")),
    unlimited(1 << 20),
];

const WRITES: [Row; 4] = [
    unlimited(16 << 10),
    unlimited(64 << 10),
    row(256 << 10, "agent H2D 256 KiB, p50", 7.5, None),
    row(1 << 20, "agent H2D 1 MiB, p50", 22.0, None),
];

/// The p99 over the p50 that the agent may have.
const TAIL: f64 = 1.15;

/// What a table is of.
struct Table<'a> {
    direction: Direction,
    rows: &'a [Row],
    /// All rounds of one size.
    time: Duration,
    /// Behind the methods' names.
    beside: &'static str,
    is_judged: bool,
}

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> Result<(), Failure> {
    let ordinal = lab.rig.gpu.ordinal;
    let is_emulated = lab.backend() == BackendKind::Emulated;
    // All that waits for running kernels, or makes them wait, comes before the agent.
    let load = match is_emulated {
        true => None,
        false => Some(lab.elsewhere(|| Load::new(&lab.rig.session, ordinal))??),
    };
    let stand = match Stand::new(lab) {
        Ok(stand) => stand,
        Err(failure) => return found.skip(lab.screen, PART, failure.to_string()),
    };
    let alone = |direction, rows, ms| {
        let time = Duration::from_millis(ms);
        Table { direction, rows, time, beside: "", is_judged: true }
    };
    let tables = [alone(Direction::DeviceToHost, &READS[..], 2000), alone(Direction::HostToDevice, &WRITES[..], 1000)];
    for table in &tables {
        measure(lab, found, &stand, table)?;
    }
    let Some(load) = load else {
        return found.skip(
            lab.screen,
            PART,
            "beside matrix products: an emulated GPU has no SM to keep busy".to_owned(),
        );
    };

    let loading = load.start(LOAD_LIMIT)?;
    for table in tables {
        let time = table.time / 2;
        measure(lab, found, &stand, &Table { time, beside: ", beside products", is_judged: false, ..table })?;
    }
    if !loading.still_runs()? {
        return Err(Failure::run("the matrix products ended before the measurement"));
    }
    drop(loading);
    if stand.launches() != 1 {
        return Err(Failure::run(format!("a dedicated agent was launched {} times", stand.launches())));
    }
    stand.stop()?;
    products::run(lab, found, &load)
}

/// Every way that there is here.
fn ways<'a>(lab: &'a Lab<'_>, found: &mut Findings, direction: Direction) -> Result<Vec<Way<'a>>, Failure> {
    let is_read = direction == Direction::DeviceToHost;
    let bar1 = if is_read { "BAR1 read" } else { "BAR1 write, flush" };
    let one = Way::Other { name: bar1, method: Box::new(Bar1(lab.mapping)), host: Host::Any, crew: None };
    let mut ways = vec![Way::Agent, Way::AgentAny, one];
    let (cores, name) = if is_read { (8, "BAR1 read, 8 cores") } else { (2, "BAR1 write, 2 cores, flush") };
    match lab.crews.of(cores) {
        Ok(crew) => {
            let method = Box::new(Parallel(lab.mapping, crew));
            ways.push(Way::Other { name, method, host: Host::Any, crew: Some(crew) });
        }
        Err(error) => found.skip(lab.screen, PART, format!("{name}: {error}"))?,
    }
    if lab.backend() != BackendKind::Emulated {
        let method = Box::new(CudaMemcpy::new(&lab.rig.buffer, HostSide::PageLocked)?);
        ways.push(Way::Other { name: "cuMemcpy, page-locked", method, host: Host::Locked, crew: None });
        // Beside a stand-in the tail says nothing.
        ways.push(Way::Nothing(Duration::ZERO));
    }
    Ok(ways)
}

fn measure(lab: &Lab<'_>, found: &mut Findings, stand: &Stand<'_>, table: &Table<'_>) -> Result<(), Failure> {
    let Table { direction, rows, time, beside, is_judged } = *table;
    let mut ways = ways(lab, found, direction)?;
    let line = |name: &str, cells: &mut dyn Iterator<Item = String>| {
        lab.screen.line(&(format!("{name:>8}") + &cells.map(|cell| format!("{cell:>22}")).collect::<String>()))
    };
    lab.screen.line("")?;
    let what = direction.in_words();
    lab.screen
        .line(&format!("{what}{beside}: single calls, p50 and p99 [us]; the bytes have arrived when a call ends"))?;
    line("size [B]", &mut ways.iter().map(|way| short(way.name(direction))))?;
    // A stand-in's threads share the CPU with this one: a few sizes show that it works.
    let most = if lab.backend() == BackendKind::Emulated { 16 << 10 } else { usize::MAX };
    for row in rows.iter().filter(|row| row.bytes <= most) {
        let bytes = u64::try_from(row.bytes).unwrap_or(u64::MAX);
        let place = Place { part: PART, direction, metric: Metric::Single, bytes };
        if let Some(last @ Way::Nothing(_)) = ways.last_mut() {
            // The host alone waits for as long as the agent takes.
            let brief = stand.measure(&[Way::Agent], (direction, row.bytes), Duration::from_millis(5))?;
            let typical = brief.times[0].quantile(500).value;
            *last = Way::Nothing(Duration::try_from_secs_f64(typical * 1e-9).unwrap_or_default());
        }
        let measured = stand.measure(&ways, (direction, row.bytes), time)?;
        line(&Binary(bytes).to_string(), &mut measured.times.iter().map(cell))?;
        keep(found, place, beside, &ways, &measured);
        let mut copies = ways.iter().zip(&measured.verified).filter(|(way, _)| !matches!(way, Way::Nothing(_)));
        if let Some((way, _)) = copies.find(|(_, verified)| !**verified) {
            lab.screen.line(&format!("  WRONG BYTES by {}", way.name(direction)))?;
        }
        if let (Some(limit), true) = (&row.limit, is_judged) {
            judge(found, direction, limit, &ways, &measured);
        }
    }
    Ok(())
}

/// As it fits above a column.
fn short(name: &str) -> String {
    name.chars().take(21).collect()
}

fn cell(times: &Times) -> String {
    let [p50, p99] = [500, 990].map(|per_mille| times.quantile(per_mille).value / 1000.0);
    format!("{p50:.2} {p99:>8.2}")
}

/// Figures of every way but the host alone, which copies nothing, and the agent over each.
fn keep(found: &mut Findings, place: Place, beside: &str, ways: &[Way<'_>], measured: &Measured) {
    let name = |way: &Way<'_>| format!("{}{beside}", way.name(place.direction));
    for (index, way) in ways.iter().enumerate() {
        if let Way::Nothing(_) = way {
            continue;
        }
        let times = &measured.times[index];
        let p50 = times.quantile(500);
        found.results.push(Figure {
            place,
            method: name(way),
            min_ns: times.min(),
            p50_ns: p50.value,
            p50_low_ns: p50.low,
            p50_high_ns: p50.high,
            p99_ns: times.quantile(990).value,
            p999_ns: times.quantile(999).value,
            max_ns: times.max(),
            rounds: measured.rounds.len(),
            iterations: u64::try_from(times.len()).unwrap_or(u64::MAX),
            verified: measured.verified[index],
        });
        if index > 0 {
            found.compare(place, &name(&ways[0]), &name(way), measured.rounds.ratio(0, index));
        }
    }
}

fn judge(found: &mut Findings, direction: Direction, limit: &Limit, ways: &[Way<'_>], measured: &Measured) {
    let times = &measured.times[0];
    let us = times.quantile(500).map(|ns| ns / 1000.0);
    // In the same rounds.
    let others = ways.iter().zip(&measured.times).skip(1).filter(|(way, _)| !matches!(way, Way::Nothing(_)));
    let others: Vec<_> = others
        .map(|(way, times)| format!("{} {:.2}", way.name(direction), times.quantile(500).value / 1000.0))
        .collect();
    found.judge(PART, limit.target, Target::AtMost(limit.us), "us", us, others.join("; "));
    if let Some(target) = limit.tail {
        let mut detail = format!("{} calls", times.len());
        if let Some(host) = ways.iter().position(|way| matches!(way, Way::Nothing(_))) {
            detail += &format!("; the host alone {:.2}", measured.times[host].tail().value);
        }
        found.judge(PART, target, Target::AtMost(TAIL), "x", times.tail(), detail);
    }
}
