//! How many requests each engine holds over time: one panel per arm, one line per engine.

use super::scale::Scale;
use super::svg::{Anchor, Area, Svg, shortened};

#[derive(Debug, Clone, PartialEq)]
pub struct LoadPanel {
    pub name: String,
    /// A few words beside the name; may be empty.
    pub note: String,
    /// One line per engine.
    pub series: Vec<Series>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    /// Which of the page's colours it has.
    pub color: usize,
    /// Model seconds, and requests running and waiting at that moment, in order of time.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 470.0;
const HEIGHT: f64 = 210.0;
const PLOT: Area = Area { x: 48.0, y: 30.0, width: 410.0, height: 130.0 };
/// More points than this cannot be told apart; each stands for the largest of its interval.
const POINTS_MAX: usize = 140;
const STRIPS: usize = 40;

/// One picture per panel, all with the same axes. `id` is unique on the page.
pub fn load(id: &str, panels: &[LoadPanel]) -> Vec<String> {
    let all = || panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points);
    let end_s = all().map(|point| point.0).fold(0.0, f64::max);
    let most = all().map(|point| point.1).fold(0.0, f64::max);
    let (time, requests) = (Scale::Linear { max: end_s.max(1.0) }, Scale::linear(most, 4));
    let draw = |(index, panel)| draw_panel(&format!("{id}-{index}"), panel, &time, &requests);
    panels.iter().enumerate().map(draw).collect()
}

fn draw_panel(id: &str, panel: &LoadPanel, time: &Scale, requests: &Scale) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.text("name", Anchor::Start, (PLOT.x, 16.0), &shortened(&panel.name, 22));
    svg.text("tick", Anchor::End, (PLOT.x + PLOT.width, 16.0), &panel.note);
    draw_axes(&mut svg, time, requests);
    let thinned: Vec<Vec<(f64, f64)>> =
        panel.series.iter().map(|series| thin(&series.points, time.value(1.0), POINTS_MAX)).collect();
    for (series, points) in panel.series.iter().zip(&thinned) {
        let line = points.iter().map(|&(at_s, held)| point(time, requests, at_s, held));
        svg.polyline(&format!("curve thin i{} d{}", series.color % 6, series.color), line);
    }
    for strip in 0..STRIPS {
        let width = PLOT.width / STRIPS as f64;
        let at_s = time.value((strip as f64 + 0.5) / STRIPS as f64);
        svg.hover(Area { x: PLOT.x + strip as f64 * width, width, ..PLOT }, &tip(at_s, panel));
    }
    svg.finish(id, &format!("Requests per engine over time, {}", panel.name), &description(panel))
}

fn draw_axes(svg: &mut Svg, time: &Scale, requests: &Scale) {
    let bottom = PLOT.y + PLOT.height;
    for tick in requests.ticks(4) {
        let (_, y) = point(time, requests, 0.0, tick);
        svg.line("grid", (PLOT.x, y), (PLOT.x + PLOT.width, y));
        svg.text("tick", Anchor::End, (PLOT.x - 8.0, y + 4.0), &format!("{tick}"));
    }
    for tick in time.ticks(8) {
        let (x, _) = point(time, requests, tick, 0.0);
        svg.text("tick", Anchor::Middle, (x, bottom + 17.0), &format!("{tick}"));
    }
    svg.text(
        "axis",
        Anchor::Middle,
        (PLOT.x + PLOT.width / 2.0, bottom + 37.0),
        "requests over model time (s)",
    );
}

fn point(time: &Scale, requests: &Scale, at_s: f64, held: f64) -> (f64, f64) {
    (PLOT.x + time.at(at_s) * PLOT.width, PLOT.y + (1.0 - requests.at(held)) * PLOT.height)
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

/// What the pointer shows at a moment: each engine's latest sample.
fn tip(at_s: f64, panel: &LoadPanel) -> String {
    let mut tip = format!("{at_s:.0} s");
    for series in &panel.series {
        let seen = series.points.partition_point(|point| point.0 <= at_s);
        if let Some((_, held)) = seen.checked_sub(1).map(|last| series.points[last]) {
            tip.push_str(&format!("\n{}: {held:.0}", series.name));
        }
    }
    tip
}

fn description(panel: &LoadPanel) -> String {
    let engines = panel.series.iter().map(|series| {
        let most = series.points.iter().map(|point| point.1).fold(0.0, f64::max);
        let mean = series.points.iter().map(|point| point.1).sum::<f64>() / series.points.len().max(1) as f64;
        format!("{}: mean {mean:.1}, most {most:.0} requests", series.name)
    });
    engines.collect::<Vec<_>>().join("; ")
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
