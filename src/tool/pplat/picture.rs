//! Round trips as a picture: medians and 99th percentiles against the size of the message.

use super::message::{Letter, RIVAL};
use super::row::Ping;
use crate::tool::answer::Mode;
use crate::tool::fail::Failure;
use crate::tool::num::f64_of;
use crate::tool::plot::{self, Curve, Panel, Picture, Quantity};
use crate::tool::report::{Figures, Report};
use crate::tool::stats::supports;

/// The curves, in the order of the legend: how messages come, the method, and the words.
const CURVES: [(&str, &str, &str); 9] = [
    (Mode::Packets.name(), "bar1", "packets, in GPU memory through BAR1"),
    (Mode::Packets.name(), RIVAL, "packets, polled in host memory"),
    (Mode::Data.name(), "bar1", "data, then flag, in GPU memory through BAR1"),
    (Mode::Data.name(), RIVAL, "data, then flag, polled in host memory"),
    (Mode::Flag.name(), "bar1", "flag alone, in GPU memory through BAR1"),
    (Mode::Flag.name(), RIVAL, "flag alone, polled in host memory"),
    (Mode::Data.name(), "mixed", "data and flag in different memories"),
    (Letter::MODE, "bar1", "channel, its ring in GPU memory"),
    (Letter::MODE, RIVAL, "channel, its ring in host memory"),
];

/// Draws.
pub(super) fn draw(report: &Report<Ping>) -> Result<String, Failure> {
    let (title, mut subtitles) = plot::titles(report);
    let long = if report.results.iter().any(Ping::has_long_answer) { " (channel, 48 B: 48)" } else { "" };
    subtitles.push(format!("Round trip: a message to a running kernel, 4 bytes back{long}"));
    let panel = |title: &str, figure: fn(&Figures) -> Option<f64>| {
        let curves = CURVES.iter().enumerate().map(|(style, &(mode, method, name))| {
            let of_curve = report.results.iter().filter(|ping| ping.is((mode, method)));
            let points = of_curve.filter_map(|ping| Some((f64_of(ping.bytes()), figure(&ping.figures)?)));
            Curve { name: name.to_owned(), style, points: points.filter(|(_, ns)| *ns > 0.0).collect() }
        });
        let curves: Vec<_> = curves.filter(|curve| !curve.points.is_empty()).collect();
        Panel { title: title.to_owned(), quantity: Quantity::Time, curves }
    };
    let medians = panel("Median", |figures| Some(figures.p50_ns));
    let tails = panel("99th percentile", |figures| supports(figures.iterations, 100).then_some(figures.p99_ns));
    let panels = [medians, tails].into_iter().filter(|panel| !panel.curves.is_empty()).collect();
    plot::draw(&Picture { title, subtitles, panels })
}
