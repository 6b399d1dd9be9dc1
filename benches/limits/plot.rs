//! The run as one picture: small reads by size, the choice of routine, vulkan over rm; messages, several cores, calls;
//! the push agent; messages to a kernel; the automatic copier.

use std::error::Error;

use gdrcopy::tool::fail::Failure;
use gdrcopy::tool::flags::Binary;
use gdrcopy::tool::report::{Direction, Metric};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::{Comparison, Figure, Place, Report};

const SIZE: (u32, u32) = (1200, 2590);
const FONT: &str = "sans-serif";
const COLOURS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 39, 40), RGBColor(44, 160, 44), RGBColor(127, 127, 127)];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// A line of a panel.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The picture as SVG.
pub(crate) fn draw(report: &Report) -> Result<String, Failure> {
    let mut svg = String::new();
    let drawn = all_panels(report, SVGBackend::with_string(&mut svg, SIZE));
    drawn.map_err(|error| Failure::run(format!("the picture cannot be drawn: {error}")))?;
    Ok(svg + "\n")
}

fn all_panels(report: &Report, backend: SVGBackend<'_>) -> Drawn {
    let root = backend.into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.titled(&report.title(), (FONT, 18))?;
    let panels = root.split_evenly((6, 2));
    let found = &report.found;

    let by_size = |value: fn(&crate::report::GridRow) -> f64| {
        found.grid.iter().map(|row| (f64::from(row.bytes), value(row))).collect()
    };
    let grid = [
        Line { name: "slowest offset".to_owned(), points: by_size(|row| row.max_ns) },
        Line { name: "median offset".to_owned(), points: by_size(|row| row.median_ns) },
        Line { name: "fastest offset".to_owned(), points: by_size(|row| row.min_ns) },
    ];
    panel(&panels[0], "Reads of 1-256 B over all offsets", ["size [B]", "time [ns]"], &grid, Scale::Linear, None)?;

    let of = |part: &str, direction, metric, is_wanted: fn(&Comparison) -> bool| -> Vec<(f64, f64)> {
        let those = found.comparisons.iter().filter(|comparison| {
            let place = &comparison.place;
            place.part == part && place.direction == direction && place.metric == metric && is_wanted(comparison)
        });
        those.map(|comparison| (log2(comparison.place.bytes), comparison.ratio)).collect()
    };
    let sides = [Direction::HostToDevice, Direction::DeviceToHost];
    let chosen = sides.map(|direction| Line {
        name: direction.name().to_owned(),
        points: of("chosen", direction, Metric::Sustained, |comparison| !comparison.is_noise),
    });
    let axes = ["size [B]", "ratio of medians"];
    panel(&panels[1], "Chosen routine over the best one, fenced", axes, &chosen, Scale::Ratio, Some(1.03))?;

    let mut vulkan = Vec::new();
    for direction in sides {
        for metric in [Metric::Sustained, Metric::Single] {
            let points = of("backends", direction, metric, |comparison| comparison.method == "vulkan");
            vulkan.push(Line { name: format!("{}, {}", direction.name(), metric.name()), points });
        }
    }
    panel(&panels[2], "Backend vulkan over rm", axes, &vulkan, Scale::Ratio, Some(1.03))?;
    let sent = bars_of(report, "posted", |figure| (figure.method.clone(), figure.p50_ns));
    bars(&panels[3], "Messages of 64 B, back to back", "time per message [ns], logarithmic", &sent)?;
    let shared = bars_of(report, "parallel", |figure| {
        let Place { direction, bytes, .. } = figure.place;
        let rate = u32::try_from(bytes).map_or(0.0, f64::from) / figure.p50_ns;
        (format!("{} {}B on {}", direction.name(), Binary(bytes), figure.method), rate)
    });
    bars(&panels[4], "Copies by several cores", "rate [GB/s], logarithmic", &shared)?;
    let calls =
        bars_of(report, "calls", |figure| (format!("{} B, {}", figure.place.bytes, figure.method), figure.p50_ns));
    bars(&panels[5], "Calls beside bare stores", "time per call [ns], logarithmic", &calls)?;
    let agent = ["agent read", "BAR1 read", "BAR1 read, 8 cores", "cuMemcpy, page-locked"].map(|over| {
        let those = found.comparisons.iter().filter(|comparison| {
            comparison.place.part == "agent" && comparison.method == "agent read_into" && comparison.over == over
        });
        let points = those.map(|comparison| (log2(comparison.place.bytes), comparison.ratio)).collect();
        Line { name: format!("over {over}"), points }
    });
    panel(&panels[6], "Reads by the agent, into memory that the GPU writes", axes, &agent, Scale::Ratio, None)?;
    let reads = bars_of(report, "agent", |figure| {
        let Place { direction, bytes, .. } = figure.place;
        let is_shown = direction == Direction::DeviceToHost && bytes == 64 << 10;
        (figure.method.clone(), if is_shown { figure.p50_ns / 1000.0 } else { 0.0 })
    });
    bars(&panels[7], "Reads of 64 KiB, alone and beside matrix products", "time per read [us], logarithmic", &reads)?;
    let messages = |wanted, value: fn(&Figure) -> f64| {
        bars_of(report, "channel", move |figure| {
            let Place { metric, bytes, .. } = figure.place;
            let is_shown = metric == wanted && !figure.method.starts_with("host alone");
            (format!("{bytes} B, {}", figure.method), if is_shown { value(figure) } else { 0.0 })
        })
    };
    let trips = messages(Metric::Rtt, |figure| figure.p50_ns);
    bars(&panels[8], "To a kernel and back, medians", "round trip [ns], logarithmic", &trips)?;
    let one_way = messages(Metric::GpuVisible, |figure| figure.p99_ns);
    bars(&panels[9], "To a kernel, 99th percentiles", "time one way [ns], logarithmic", &one_way)?;
    let mut auto = Vec::new();
    for (method, memory) in [("auto", "ordinary"), ("auto_pinned", "page-locked")] {
        for direction in sides {
            let those = found.comparisons.iter().filter(|comparison| {
                let Place { part, direction: side, .. } = comparison.place;
                part == "auto"
                    && side == direction
                    && comparison.method == method
                    && comparison.over.starts_with("best")
            });
            let points = those.map(|comparison| (log2(comparison.place.bytes), comparison.ratio)).collect();
            auto.push(Line { name: format!("{}, {memory} memory", direction.name()), points });
        }
    }
    panel(&panels[10], "Automatic copier over the best method", axes, &auto, Scale::Ratio, Some(1.05))?;
    let reads = bars_of(report, "auto", |figure| {
        let Place { direction, bytes, .. } = figure.place;
        let is_shown = direction == Direction::DeviceToHost && bytes == 64 << 10;
        (figure.method.clone(), if is_shown { figure.p50_ns / 1000.0 } else { 0.0 })
    });
    bars(&panels[11], "Reads of 64 KiB by every method", "time per read [us], logarithmic", &reads)?;
    root.present()?;
    Ok(())
}

/// What the axes are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// Times from 0, by size.
    Linear,
    /// Ratios around 1, by the logarithm of the size.
    Ratio,
}

/// A size on an axis.
fn size_label(scale: Scale, x: f64) -> String {
    if scale == Scale::Linear {
        return format!("{x:.0}");
    }
    let power = (0..=30).find(|&power| (f64::from(power) - x).abs() < 1e-6);
    power.map_or_else(String::new, |power| Binary(1 << power).to_string())
}

fn panel(area: &Area<'_>, title: &str, [x, y]: [&str; 2], lines: &[Line], scale: Scale, limit: Option<f64>) -> Drawn {
    let points = || lines.iter().flat_map(|line| &line.points).filter(|(_, value)| value.is_finite());
    if points().next().is_none() {
        return empty(area, title);
    }
    let first = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let last = points().map(|point| point.0).fold(f64::NEG_INFINITY, f64::max).max(first + 1.0);
    let (low, high) =
        points().fold((f64::INFINITY, 0.0_f64), |(low, high), point| (low.min(point.1), high.max(point.1)));
    let range = match scale {
        Scale::Linear => 0.0..high * 1.15,
        Scale::Ratio => (low - 0.02).min(0.95)..(high + 0.02).max(1.1),
    };
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 16))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(first..last, range)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_label_formatter(&|x| size_label(scale, *x))
        .x_desc(x)
        .y_desc(y)
        .label_style((FONT, 12))
        .draw()?;
    for (line, colour) in lines.iter().zip(COLOURS) {
        let finite = line.points.iter().copied().filter(|(_, value)| value.is_finite());
        chart
            .draw_series(LineSeries::new(finite, colour.stroke_width(2)))?
            .label(line.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    if let Some(limit) = limit {
        let across = [(first, limit), (last, limit)];
        chart
            .draw_series(LineSeries::new(across, BLACK.stroke_width(1)))?
            .label("target")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], BLACK));
    }
    let position = SeriesLabelPosition::UpperRight;
    chart
        .configure_series_labels()
        .position(position)
        .border_style(BLACK)
        .background_style(WHITE)
        .label_font((FONT, 12))
        .draw()?;
    Ok(())
}

/// The figures of a part, each named once: the second of a pair is there for the noise.
fn bars_of(report: &Report, part: &str, bar: impl Fn(&Figure) -> (String, f64)) -> Vec<(String, f64)> {
    let mut rows: Vec<(String, f64)> = Vec::new();
    for (name, value) in report.found.results.iter().filter(|figure| figure.place.part == part).map(bar) {
        if value.is_finite() && value > 0.0 && !rows.iter().any(|(there, _)| *there == name) {
            rows.push((name, value));
        }
    }
    rows
}

/// Bars on an axis on which every line is ten times the one before.
fn bars(area: &Area<'_>, title: &str, axis: &str, rows: &[(String, f64)]) -> Drawn {
    if rows.is_empty() {
        return empty(area, title);
    }
    let count = f64::from(u32::try_from(rows.len())?);
    let most = rows.iter().map(|row| row.1).fold(1.0, f64::max);
    let least = rows.iter().map(|row| row.1).fold(most, f64::min) / 4.0;
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 16))
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(8)
        .build_cartesian_2d((least..most * 20.0).log_scale(), 0.0..count)?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .disable_y_mesh()
        .y_labels(0)
        .x_desc(axis)
        .label_style((FONT, 12))
        .draw()?;
    for ((name, value), index) in rows.iter().zip(0_u32..) {
        let top = count - f64::from(index) - 0.15;
        chart.draw_series([Rectangle::new([(least, top - 0.7), (*value, top)], COLOURS[0].filled())])?;
        let text = format!("{name}: {value:.2}");
        chart.draw_series([Text::new(text, (value * 1.1, top - 0.2), (FONT, 12))])?;
    }
    Ok(())
}

/// A panel of a part that was not run.
fn empty(area: &Area<'_>, title: &str) -> Drawn {
    area.draw_text(&format!("{title}: not measured"), &(FONT, 14).into_text_style(area), (20, 20))?;
    Ok(())
}

fn log2(bytes: u64) -> f64 {
    u32::try_from(bytes).map_or(32.0, |bytes| f64::from(bytes).log2())
}
