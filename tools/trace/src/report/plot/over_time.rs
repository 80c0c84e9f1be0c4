//! What several engines or GPUs measure over time: one panel per arm, one line for each of them.

use super::scale::Scale;
use super::svg::{Anchor, Area, Svg, shortened};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measure {
    pub title: &'static str,
    pub axis: &'static str,
    pub unit: &'static str,
    /// The most that there can be; `None` is the most that there was.
    pub most: Option<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    pub name: String,
    /// A few words beside the name; may be empty.
    pub note: String,
    /// One line each.
    pub series: Vec<Series>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    /// Which of the page's colours it has.
    pub color: usize,
    /// Model seconds, and what was measured then, in order of time.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 470.0;
const HEIGHT: f64 = 210.0;
const PLOT: Area = Area { x: 48.0, y: 30.0, width: 410.0, height: 130.0 };
/// More points than this cannot be told apart; each stands for the largest of its interval.
const POINTS_MAX: usize = 140;
const STRIPS: usize = 40;

/// One picture per panel, all with the same axes. `id` is unique on the page.
pub fn over_time(id: &str, measure: &Measure, panels: &[Panel]) -> Vec<String> {
    let all = || panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points);
    let end_s = all().map(|point| point.0).fold(0.0, f64::max);
    let most = measure.most.unwrap_or_else(|| all().map(|point| point.1).fold(0.0, f64::max));
    let axes = Axes { time: Scale::Linear { max: end_s.max(1.0) }, values: Scale::linear(most, 4) };
    let draw = |(index, panel)| draw_panel(&format!("{id}-{index}"), measure, panel, &axes);
    panels.iter().enumerate().map(draw).collect()
}

struct Axes {
    time: Scale,
    values: Scale,
}

impl Axes {
    fn point(&self, (at_s, value): (f64, f64)) -> (f64, f64) {
        (PLOT.x + self.time.at(at_s) * PLOT.width, PLOT.y + (1.0 - self.values.at(value)) * PLOT.height)
    }
}

fn draw_panel(id: &str, measure: &Measure, panel: &Panel, axes: &Axes) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.text("name", Anchor::Start, (PLOT.x, 16.0), &shortened(&panel.name, 22));
    svg.text("tick", Anchor::End, (PLOT.x + PLOT.width, 16.0), &panel.note);
    draw_axes(&mut svg, measure, axes);
    for series in &panel.series {
        let points = thin(&series.points, axes.time.value(1.0), POINTS_MAX);
        let line = points.into_iter().map(|point| axes.point(point));
        svg.polyline(&format!("curve thin i{} d{}", series.color % 6, series.color), line);
    }
    for strip in 0..STRIPS {
        let width = PLOT.width / STRIPS as f64;
        let at_s = axes.time.value((strip as f64 + 0.5) / STRIPS as f64);
        svg.hover(Area { x: PLOT.x + strip as f64 * width, width, ..PLOT }, &tip(at_s, panel));
    }
    svg.finish(id, &format!("{}, {}", measure.title, panel.name), &description(measure, panel))
}

fn draw_axes(svg: &mut Svg, measure: &Measure, axes: &Axes) {
    let bottom = PLOT.y + PLOT.height;
    for tick in axes.values.ticks(4) {
        let (_, y) = axes.point((0.0, tick));
        svg.line("grid", (PLOT.x, y), (PLOT.x + PLOT.width, y));
        svg.text("tick", Anchor::End, (PLOT.x - 8.0, y + 4.0), &format!("{tick}"));
    }
    for tick in axes.time.ticks(8) {
        let (x, _) = axes.point((tick, 0.0));
        svg.text("tick", Anchor::Middle, (x, bottom + 17.0), &format!("{tick}"));
    }
    svg.text("axis", Anchor::Middle, (PLOT.x + PLOT.width / 2.0, bottom + 37.0), measure.axis);
}

/// At most `most` points: the largest value of each interval, at the moment of its first point.
fn thin(points: &[(f64, f64)], end_s: f64, most: usize) -> Vec<(f64, f64)> {
    let interval = |at_s: f64| (at_s / end_s * most as f64) as usize;
    let mut thinned: Vec<(f64, f64)> = Vec::new();
    for &(at_s, held) in points {
        match thinned.last_mut() {
            Some(last) if points.len() > most && interval(last.0) == interval(at_s) => {
                last.1 = last.1.max(held)
            }
            _ => thinned.push((at_s, held)),
        }
    }
    thinned
}

/// What the pointer shows at a moment: the latest sample of each.
fn tip(at_s: f64, panel: &Panel) -> String {
    let mut tip = format!("{at_s:.0} s");
    for series in &panel.series {
        let seen = series.points.partition_point(|point| point.0 <= at_s);
        if let Some((_, held)) = seen.checked_sub(1).map(|last| series.points[last]) {
            tip.push_str(&format!("\n{}: {held:.0}", series.name));
        }
    }
    tip
}

fn description(measure: &Measure, panel: &Panel) -> String {
    let lines = panel.series.iter().map(|series| {
        let most = series.points.iter().map(|point| point.1).fold(0.0, f64::max);
        let mean = series.points.iter().map(|point| point.1).sum::<f64>() / series.points.len().max(1) as f64;
        format!("{}: mean {mean:.1}, most {most:.0} {}", series.name, measure.unit)
    });
    lines.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_peaks_and_the_bound() {
        let points: Vec<(f64, f64)> =
            (0..10_000).map(|at| (f64::from(at) / 10.0, if at == 7_777 { 99.0 } else { 1.0 })).collect();
        let thinned = thin(&points, 1_000.0, 240);
        assert!(thinned.len() <= 241, "{}", thinned.len());
        assert!(thinned.iter().any(|point| point.1 == 99.0));
        assert_eq!(thin(&points[..100], 1_000.0, 240).len(), 100);
    }
}
