//! Line plots as SVG: sizes on a logarithmic axis, values on a linear or logarithmic one.
//!
//! Colours are classes, so that the page's style decides on them: `s0`, `s1`, … for lines.

use std::fmt::Write as _;

use super::data::Figure;
use super::page::{bytes, escape, value};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 22.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 40.0;

/// Number of line colours in the style.
pub(crate) const COLOURS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    Log,
}

/// The values of an axis, and where they are drawn.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    /// Pixels of `low` and of `high`.
    ends: (f64, f64),
    ticks: Vec<f64>,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let along = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).ln(),
        };
        let part = (along(value) - along(self.low)) / (along(self.high) - along(self.low));
        self.ends.0 + part.clamp(0.0, 1.0) * (self.ends.1 - self.ends.0)
    }

    /// Sizes: whole powers of two, with a tick at every third.
    fn sizes(low: u64, high: u64) -> Self {
        let low = low.max(1).ilog2();
        let high = high.max(2).ilog2().max(low + 1);
        let step = (high - low).div_ceil(8).max(1);
        // From the largest size down: that one is read most.
        let ticks = (low..=high).rev().step_by(step as usize).map(|power| 2f64.powi(power as i32));
        let (low, high) = (2f64.powi(low as i32), 2f64.powi(high as i32));
        let ends = (LEFT, WIDTH - RIGHT);
        Self { scale: Scale::Log, low, high, ends, ticks: ticks.collect() }
    }

    fn linear(high: f64) -> Self {
        let step = round_up(high / 5.0);
        let count = (high / step).ceil().max(1.0);
        let ticks = (0..=count as u32).map(|at| f64::from(at) * step).collect();
        let ends = (HEIGHT - BOTTOM, TOP);
        Self { scale: Scale::Linear, low: 0.0, high: count * step, ends, ticks }
    }

    /// From a value below the least one to one above the largest, each a 1, 2 or 5 with zeros.
    fn log(least: f64, largest: f64) -> Self {
        let mut ticks = Vec::new();
        let mut at = 10f64.powf(least.log10().floor());
        let steps = [1.0, 2.0, 5.0];
        'decades: loop {
            for factor in steps {
                if at * factor * 2.5 > least {
                    ticks.push(at * factor);
                }
                if at * factor >= largest && ticks.len() > 1 {
                    break 'decades;
                }
            }
            at *= 10.0;
        }
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        // Twelve labels fit.
        if ticks.len() > 12 {
            let is_decade = |tick: &f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
            ticks.retain(is_decade);
        }
        let ends = (HEIGHT - BOTTOM, TOP);
        Self { scale: Scale::Log, low, high, ends, ticks }
    }
}

/// The next 1, 2 or 5 with zeros.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let found = factors.into_iter().find(|factor| factor * power >= value * 0.999_999);
    found.unwrap_or(10.0) * power
}

/// The plot of all figures that have points; `None` if no figure has.
pub(crate) fn svg(title: &str, unit: &str, scale: Scale, figures: &[&Figure]) -> Option<String> {
    let points = || figures.iter().flat_map(|figure| &figure.points);
    let sizes = || points().map(|point| point.bytes);
    let positive = || points().map(|point| point.value).filter(|value| *value > 0.0);
    let x = Axis::sizes(sizes().min()?, sizes().max()?);
    let (least, largest) = (
        positive().min_by(f64::total_cmp)?,
        positive().max_by(f64::total_cmp).filter(|largest| largest.is_finite())?,
    );
    let y = match scale {
        Scale::Linear => Axis::linear(largest),
        Scale::Log => Axis::log(least, largest),
    };
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
        escape(title)
    );
    axes(&mut svg, &x, &y, unit);
    for (index, figure) in figures.iter().enumerate() {
        line(&mut svg, &x, &y, index, figure, unit);
    }
    svg += "</svg>\n";
    Some(svg)
}

fn axes(svg: &mut String, x: &Axis, y: &Axis, unit: &str) {
    let (left, right, bottom) = (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in &y.ticks {
        let at = y.at(*tick);
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{left} {at:.1}H{right}\"/>");
        let (label, text) = (left - 8.0, short(*tick));
        let _ =
            writeln!(svg, "<text class=\"end\" x=\"{label}\" y=\"{:.1}\">{text}</text>", at + 4.0);
    }
    for tick in &x.ticks {
        let at = x.at(*tick);
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>");
        let (under, text) = (bottom + 18.0, bytes(*tick as u64));
        let _ = writeln!(svg, "<text class=\"mid\" x=\"{at:.1}\" y=\"{under}\">{text}</text>");
    }
    let _ = writeln!(svg, "<path class=\"axis\" d=\"M{left} {TOP}V{bottom}H{right}\"/>");
    let _ = writeln!(svg, "<text x=\"4\" y=\"16\">{}</text>", escape(unit));
    let under = HEIGHT - 6.0;
    let _ = writeln!(svg, "<text class=\"end\" x=\"{right}\" y=\"{under}\">message size</text>");
}

fn line(svg: &mut String, x: &Axis, y: &Axis, index: usize, figure: &Figure, unit: &str) {
    let (colour, style) = (index % COLOURS, if figure.peer { " peer" } else { "" });
    let place = |point: &super::data::Point| (x.at(point.bytes as f64), y.at(point.value));
    let path: Vec<String> = figure
        .points
        .iter()
        .map(|point| {
            let (x, y) = place(point);
            format!("{x:.1} {y:.1}")
        })
        .collect();
    let Some(first) = path.first() else { return };
    let rest = &path[1..];
    let path = if rest.is_empty() { first.clone() } else { format!("{first}L{}", rest.join("L")) };
    let _ = writeln!(svg, "<path class=\"line s{colour}{style}\" d=\"M{path}\"/>");
    for point in &figure.points {
        let (x, y) = place(point);
        let size = bytes(point.bytes);
        let (name, value) = (escape(&figure.name), value(point.value, unit));
        let _ = writeln!(
            svg,
            "<circle class=\"dot s{colour}{style}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.8\">\
             <title>{name}, {size}: {value}</title></circle>"
        );
    }
}

/// A tick's label: `0.5`, `20`, `2k`.
fn short(tick: f64) -> String {
    match tick {
        tick if tick >= 1e6 => format!("{}M", tick / 1e6),
        tick if tick >= 1e4 => format!("{}k", tick / 1e3),
        tick => {
            let text = format!("{tick:.4}");
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
                false => text,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_cover_the_values() {
        for (least, largest) in [(0.3, 9.0), (1.0, 1.0), (4.9, 5.1), (0.02, 12_345.0)] {
            let axis = Axis::log(least, largest);
            assert!(axis.low <= least && axis.high >= largest, "{least} {largest}");
            assert!(axis.ticks.len() >= 2 && axis.ticks.len() <= 12, "{:?}", axis.ticks);
        }
        for high in [0.003, 1.0, 9.7, 12.3, 480.0] {
            let axis = Axis::linear(high);
            assert!(axis.high >= high && axis.high <= 2.0 * high, "{high} {}", axis.high);
            assert!((2..=7).contains(&axis.ticks.len()), "{:?}", axis.ticks);
        }
    }

    #[test]
    fn values_stay_inside() {
        let axis = Axis::sizes(2, 4 << 20);
        assert_eq!((axis.at(2.0), axis.at(4_194_304.0)), (LEFT, WIDTH - RIGHT));
        assert!(axis.at(0.0) >= LEFT && axis.at(1e12) <= WIDTH - RIGHT);
        assert!(axis.ticks.contains(&4_194_304.0) && axis.ticks.len() <= 9);
        // One size alone has an axis, too.
        assert!(Axis::sizes(8, 8).at(8.0).is_finite());
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([0.05, 0.5, 20.0, 20_000.0, 5e6].map(short), ["0.05", "0.5", "20", "20k", "5M"]);
    }
}
