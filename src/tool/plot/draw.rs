//! A [`Picture`] as SVG. The library places and escapes; axes, ticks and legend are ours, because sizes want powers of two
//! and times want units.

use std::collections::BTreeMap;

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle};

use super::{Panel, Picture, Quantity};
use crate::tool::fail::Failure;
use crate::tool::flags::size_in_words;
use crate::tool::num::{i32_of_f64, u64_of_f64};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

const WIDTH: i32 = 1000;
const MARGIN: i32 = 14;
const TITLE: i32 = 40;
const SUBTITLE: i32 = 22;
const PANEL_HEIGHT: i32 = 330;
const LEGEND_LINE: i32 = 26;
/// Room around the axes of a panel: tick labels to the left and below, the title above.
const LEFT: i32 = 84;
const RIGHT: i32 = 18;
const TOP: i32 = 34;
const BOTTOM: i32 = 32;

const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
const WARNING: RGBColor = RGBColor(0xb0, 0x00, 0x20);
/// Told apart by colour-blind people, above all those at the front (after Okabe and Ito), and dark enough for white paper.
const PALETTE: [RGBColor; 12] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x7a, 0x7a, 0x7a),
    RGBColor(0x6a, 0x3d, 0x9a),
    RGBColor(0xb1, 0x00, 0x26),
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x8c, 0x51, 0x0a),
    RGBColor(0x01, 0x66, 0x5e),
];

/// Draws.
///
/// # Errors
///
/// There is no curve.
pub fn draw(picture: &Picture) -> Result<String, Failure> {
    let curves = picture.panels.iter().flat_map(|panel| &panel.curves);
    let names: BTreeMap<usize, &str> = curves.map(|curve| (curve.style, curve.name.as_str())).collect();
    if names.is_empty() {
        return Err(Failure::run("--plot: there is nothing to draw; measure at least one size"));
    }
    let columns = picture.panels.len().min(2);
    let rows = i32_of(picture.panels.len().div_ceil(columns));
    let head = MARGIN + TITLE + SUBTITLE * i32_of(picture.subtitles.len());
    let legend_lines = i32_of(names.len().div_ceil(2));
    let height = head + rows * PANEL_HEIGHT + legend_lines * LEGEND_LINE + 2 * MARGIN;

    let mut svg = String::new();
    let size = (WIDTH.unsigned_abs(), height.unsigned_abs());
    let drawn = (|| {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&PAPER)?;
        heading(&area, picture)?;
        let width = (WIDTH - 2 * MARGIN) / i32_of(columns);
        for (n, panel) in picture.panels.iter().enumerate() {
            let corner = (MARGIN + width * i32_of(n % columns), head + PANEL_HEIGHT * i32_of(n / columns));
            Axes::new(panel, corner, width).draw(&area, panel)?;
        }
        legend(&area, &names, head + rows * PANEL_HEIGHT + MARGIN)?;
        area.present()?;
        Ok(())
    })();
    let drawn: Drawn = drawn;
    drawn.map_err(|error| Failure::run(format!("--plot: {error}")))?;
    Ok(svg)
}

fn i32_of(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn text_style(size: f64, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'static> {
    // What the library calls size is the height of a line, not that of the font.
    let mut style = TextStyle::from(("sans-serif", size * 1.24).into_font()).pos(Pos::new(h, v));
    style.color = color.to_backend_color();
    style
}

fn heading(area: &Area<'_>, picture: &Picture) -> Drawn {
    let style = text_style(21.0, INK, HPos::Left, VPos::Top);
    area.draw(&Text::new(fitted(&picture.title, 88), (MARGIN, MARGIN), style))?;
    for (n, line) in picture.subtitles.iter().enumerate() {
        let color = if line.starts_with('*') { WARNING } else { INK };
        let style = text_style(15.0, color, HPos::Left, VPos::Top);
        area.draw(&Text::new(fitted(line, 125), (MARGIN, MARGIN + TITLE - 6 + SUBTITLE * i32_of(n)), style))?;
    }
    Ok(())
}

/// A line that keeps to the paper.
fn fitted(line: &str, most: usize) -> String {
    match line.char_indices().nth(most) {
        Some((end, _)) => format!("{}..", &line[..end]),
        None => line.to_owned(),
    }
}

fn legend(area: &Area<'_>, names: &BTreeMap<usize, &str>, top: i32) -> Drawn {
    for (n, (&style, name)) in names.iter().enumerate() {
        let x = MARGIN + LEFT + (WIDTH - 2 * MARGIN) / 2 * i32_of(n % 2) - 30;
        let y = top + LEGEND_LINE * i32_of(n / 2) + LEGEND_LINE / 2;
        area.draw(&PathElement::new(vec![(x - 34, y), (x, y)], stroke(style)))?;
        marker(area, style, (x - 17, y))?;
        area.draw(&Text::new((*name).to_owned(), (x + 10, y), text_style(15.0, INK, HPos::Left, VPos::Center)))?;
    }
    Ok(())
}

fn stroke(n: usize) -> ShapeStyle {
    PALETTE[n % PALETTE.len()].stroke_width(2)
}

/// Shapes differ, too, for those who see no colours.
fn marker(area: &Area<'_>, n: usize, (x, y): (i32, i32)) -> Drawn {
    let color = PALETTE[n % PALETTE.len()];
    let square = [(x - 4, y - 4), (x + 4, y + 4)];
    match (n + n / 4) % 4 {
        0 => area.draw(&Circle::new((x, y), 4, color.filled()))?,
        1 => area.draw(&Rectangle::new(square, color.filled()))?,
        2 => {
            area.draw(&Circle::new((x, y), 4, PAPER.filled()))?;
            area.draw(&Circle::new((x, y), 4, color.stroke_width(2)))?;
        }
        _ => {
            area.draw(&Rectangle::new(square, PAPER.filled()))?;
            area.draw(&Rectangle::new(square, color.stroke_width(2)))?;
        }
    }
    Ok(())
}

/// The two axes of a panel, in pixels and in logarithms (base 2 across, base 10 up).
struct Axes {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn new(panel: &Panel, corner: (i32, i32), width: i32) -> Self {
        let points = || panel.curves.iter().flat_map(|curve| &curve.points);
        let (x0, x1) = extent(points().map(|(x, _)| x.log2()));
        let (y0, y1) = extent(points().map(|(_, y)| y.log10()));
        // A little air, and some width where there is but one size.
        let x = if x1 - x0 < 1.0 { (x0 - 1.0, x1 + 1.0) } else { (x0 - 0.2, x1 + 0.2) };
        let y = ((y0 - 0.05).floor(), (y1 + 0.05).ceil());
        Self {
            left: corner.0 + LEFT,
            right: corner.0 + width - RIGHT,
            top: corner.1 + TOP,
            bottom: corner.1 + PANEL_HEIGHT - BOTTOM,
            x,
            y,
        }
    }

    fn across(&self, log2: f64) -> i32 {
        self.left + i32_of_f64(f64::from(self.right - self.left) * (log2 - self.x.0) / (self.x.1 - self.x.0))
    }

    fn up(&self, log10: f64) -> i32 {
        self.bottom - i32_of_f64(f64::from(self.bottom - self.top) * (log10 - self.y.0) / (self.y.1 - self.y.0))
    }

    fn draw(&self, area: &Area<'_>, panel: &Panel) -> Drawn {
        let style = text_style(16.0, INK, HPos::Left, VPos::Bottom);
        area.draw(&Text::new(panel.title.clone(), (self.left, self.top - 8), style))?;
        for tick in ticks(self.x, 7) {
            let x = self.across(tick);
            area.draw(&PathElement::new(vec![(x, self.top), (x, self.bottom)], GRID))?;
            let style = text_style(13.0, INK, HPos::Center, VPos::Top);
            area.draw(&Text::new(size_in_words(u64_of_f64(tick.exp2())), (x, self.bottom + 7), style))?;
        }
        for tick in ticks(self.y, 9) {
            let y = self.up(tick);
            area.draw(&PathElement::new(vec![(self.left, y), (self.right, y)], GRID))?;
            let style = text_style(13.0, INK, HPos::Right, VPos::Center);
            area.draw(&Text::new(power_of_ten(tick, panel.quantity), (self.left - 7, y), style))?;
        }
        area.draw(&Rectangle::new([(self.left, self.top), (self.right, self.bottom)], INK.stroke_width(1)))?;
        for curve in &panel.curves {
            let n = curve.style;
            let points: Vec<_> =
                curve.points.iter().map(|(x, y)| (self.across(x.log2()), self.up(y.log10()))).collect();
            area.draw(&PathElement::new(points.clone(), stroke(n)))?;
            points.into_iter().try_for_each(|point| marker(area, n, point))?;
        }
        Ok(())
    }
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// Whole numbers in the range, at most so many or one more: every one, every second, every fourth, ..
fn ticks((low, high): (f64, f64), most: u64) -> Vec<f64> {
    let mut step = 1.0;
    while u64_of_f64((high - low) / step) > most {
        step *= 2.0;
    }
    let first = (low / step).ceil() * step;
    std::iter::successors(Some(first), |tick| Some(tick + step)).take_while(|tick| *tick <= high + 1e-9).collect()
}

/// `10 ns`, `1 us`, `100 MB/s`.
fn power_of_ten(exponent: f64, quantity: Quantity) -> String {
    // The smallest unit of each, and how many powers of ten it is below the unit that is plotted.
    let (units, below): (&[&str], f64) = match quantity {
        Quantity::Time => (&["ps", "ns", "us", "ms", "s"], 3.0),
        Quantity::Bandwidth => (&["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 9.0),
    };
    let exponent = (exponent + below).max(0.0);
    let unit = (exponent / 3.0).floor().min(4.0);
    let number = u64_of_f64(10.0_f64.powf(exponent - 3.0 * unit));
    let unit = usize::try_from(u64_of_f64(unit)).ok().and_then(|unit| units.get(unit)).unwrap_or(&"");
    format!("{number} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_few_and_even() {
        assert_eq!(ticks((-0.2, 24.2), 7), [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0]);
        assert_eq!(ticks((15.8, 24.2), 7), [16.0, 18.0, 20.0, 22.0, 24.0]);
        assert_eq!(ticks((0.0, 3.0), 9), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(ticks((11.0, 13.0), 7), [11.0, 12.0, 13.0]);
    }

    #[test]
    fn labels_have_units() {
        let time = |exponent| power_of_ten(exponent, Quantity::Time);
        assert_eq!(
            [0.0, 1.0, 2.0, 3.0, 6.0, 9.0, 10.0, -1.0].map(time),
            ["1 ns", "10 ns", "100 ns", "1 us", "1 ms", "1 s", "10 s", "100 ps"]
        );
        let rate = |exponent| power_of_ten(exponent, Quantity::Bandwidth);
        assert_eq!([-9.0, -3.0, -1.0, 0.0, 2.0].map(rate), ["1 B/s", "1 MB/s", "100 MB/s", "1 GB/s", "100 GB/s"]);
    }

    #[test]
    fn long_lines_are_cut() {
        assert_eq!(fitted("abc", 3), "abc");
        assert_eq!(fitted("äöüx", 3), "äöü..");
    }
}
