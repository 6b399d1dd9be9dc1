//! Reads of 1 to 256 bytes at every offset in a line: each should be one round trip of the bus.

use gdrcopy::tool::ab::{Arm, Rounds, median};
use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::report::{Direction, Metric};

use crate::lab::{Lab, patterned};
use crate::report::{self, Findings, GridRow, Place, Target};

const PART: &str = "grid";
const SIZES: u32 = 256;
const OFFSETS: u32 = 64;
/// Walks over the whole grid, so that no cell sees one moment of the machine only.
const PASSES: u32 = 20;
/// Reads of a cell in one pass; their median is the pass's figure.
const READS: u32 = 15;

/// The aligned line that stands for one round trip, and the same once more.
const ROUND_TRIP: usize = 64;

pub(crate) fn run(lab: &Lab<'_>, found: &mut Findings) -> Result<(), Failure> {
    let passes = lab.pace.times(PASSES);
    let reads = if passes < PASSES { 3 } else { READS };
    let sizes: Vec<u32> = (1..=SIZES).collect();
    let data = patterned(len(SIZES + OFFSETS), 9);
    lab.device_put(0, &data)?;

    let cells = sizes.len() * len(OFFSETS);
    let mut times: Vec<Vec<f64>> = (0..cells).map(|_| Vec::with_capacity(len(passes))).collect();
    let mut verified = vec![true; cells];
    let (mut trips, mut trips_again) = (Vec::new(), Vec::new());
    for _ in 0..passes {
        // The reference is taken all along, and so at the same moments.
        let (mut trip, mut trip_again) = (Vec::new(), Vec::new());
        for (row, &size) in sizes.iter().enumerate() {
            let reference = |lab: &Lab<'_>| read(lab, 0, ROUND_TRIP, READS.min(reads), &data).map(|(ns, _)| ns);
            trip.push(reference(lab)?);
            for offset in 0..len(OFFSETS) {
                let (ns, is_right) = read(lab, offset, len(size), reads, &data)?;
                let cell = row * len(OFFSETS) + offset;
                times[cell].push(ns);
                verified[cell] &= is_right;
            }
            trip_again.push(reference(lab)?);
        }
        trips.push(median(&mut trip));
        trips_again.push(median(&mut trip_again));
    }

    // Every cell by the median over its passes: what one moment did to it is not its own.
    let typical: Vec<f64> = times.iter().map(|times| median(&mut times.clone())).collect();
    let worst = (0..cells).max_by(|&a, &b| typical[a].total_cmp(&typical[b])).unwrap_or(0);
    let mut by_rank: Vec<usize> = (0..cells).collect();
    by_rank.sort_unstable_by(|&a, &b| typical[a].total_cmp(&typical[b]));
    let middle = by_rank[cells / 2];
    let arms = vec![times[worst].clone(), times[middle].clone(), trips, trips_again];
    let rounds = Rounds::of(arms);
    let place = |cell: usize| Place {
        part: PART,
        direction: Direction::DeviceToHost,
        metric: Metric::Single,
        bytes: bytes(cell),
    };

    lab.screen.line("")?;
    lab.screen.line(&format!(
        "Reads of 1-{SIZES} B at offsets 0-{}, one at a time, {passes} passes of {reads} each [ns]",
        OFFSETS - 1
    ))?;
    let named = [
        (place(worst), "worst cell", 0, verified.iter().all(|&right| right)),
        (place(middle), "median cell", 1, verified[middle]),
        (Place { bytes: 64, ..place(0) }, "one round trip (64 B, aligned)", 2, true),
    ];
    for (place, name, index, verified) in named {
        let taken = report::Arm { rounds: &rounds, index, calls: reads, per_call: 1.0 };
        let median = found.figure(place, name, &taken, verified);
        let note = if verified { "" } else { "  WRONG BYTES" };
        lab.screen.line(&format!("  {name:<32}{median:.0}{note}"))?;
    }
    let (to_trip, to_median, noise) = (rounds.ratio(0, 2), rounds.ratio(0, 1), rounds.ratio(3, 2));
    for (name, over, ratio) in [
        ("worst cell", "one round trip", to_trip),
        ("worst cell", "median cell", to_median),
        ("one round trip", "one round trip", noise),
    ] {
        found.compare(place(worst), name, over, ratio);
        lab.screen.line(&format!("  {:<32}{ratio:.3}", format!("{name} / {over}")))?;
    }
    let beyond = typical.iter().filter(|&&ns| ns > 1.15 * rounds.median(2).value).count();
    lab.screen.line(&format!("  {beyond} of {cells} cells take more than 1.15 round trips"))?;

    found.grid = sizes
        .iter()
        .enumerate()
        .map(|(row, &size)| grid_row(size, &typical[row * len(OFFSETS)..][..len(OFFSETS)]))
        .collect();
    let detail = format!("{} B at offset {}", bytes(worst), worst % len(OFFSETS));
    found.judge(
        PART,
        "reads of 1-256 B, worst cell / one round trip",
        Target::AtMost(1.15),
        "x",
        to_trip,
        detail.clone(),
    );
    found.judge(PART, "reads of 1-256 B, worst cell / median cell", Target::AtMost(1.3), "x", to_median, detail);
    Ok(())
}

fn len(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// The size that a cell reads.
fn bytes(cell: usize) -> u64 {
    u64::try_from(cell / len(OFFSETS)).unwrap_or(0) + 1
}

/// The median of some reads, and whether the last one brought the right bytes.
fn read(lab: &Lab<'_>, offset: usize, size: usize, reads: u32, data: &[u8]) -> Result<(f64, bool), Failure> {
    let mut to = vec![0; size];
    let mut ns = None;
    // A thread that is moved makes a block void: at most a few in a row.
    for _ in 0..100 {
        ns = Arm::single(reads, |_| lab.mapping.read(offset, &mut to)).run(lab.clock)?;
        if ns.is_some() {
            break;
        }
    }
    let ns = ns.ok_or_else(|| Failure::run("the thread is moved from CPU to CPU all the time; name one with --cpu"))?;
    Ok((ns, to == data[offset..offset + size]))
}

fn grid_row(size: u32, cells: &[f64]) -> GridRow {
    let (max_at_offset, max_ns) =
        (0..).zip(cells.iter().copied()).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    let min_ns = cells.iter().copied().reduce(f64::min).unwrap_or(0.0);
    GridRow { bytes: size, min_ns, median_ns: median(&mut cells.to_vec()), max_ns, max_at_offset }
}
