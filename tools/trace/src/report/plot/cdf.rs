//! Distributions as cumulative shares over a logarithmic axis: one line per group.

use super::scale::{Scale, plain};
use super::svg::{Anchor, Area, Svg};
use crate::quantile::quantile;
use crate::units::seconds;

/// One group's values.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    pub name: String,
    /// Which of the page's colours it has.
    pub color: usize,
    /// Its values in seconds, sorted.
    pub sorted_s: Vec<f64>,
}

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 340.0;
const PLOT: Area = Area { x: 52.0, y: 12.0, width: 880.0, height: 276.0 };
/// A line through this many quantiles looks smooth.
const STEPS: usize = 200;
/// Vertical strips that answer the pointer.
const STRIPS: usize = 60;

/// The share of each group's values at or below a time. `id` is unique on the page.
pub fn distributions(id: &str, title: &str, axis: &str, groups: &[Distribution]) -> String {
    let ends = groups.iter().filter_map(|group| Some((*group.sorted_s.first()?, *group.sorted_s.last()?)));
    let (min, max) =
        ends.fold((f64::INFINITY, 0.0f64), |(min, max), (low, high)| (min.min(low), max.max(high)));
    // Times that round to nothing would stretch the axis over decades in which nothing happens.
    let scale = Scale::log(min.max(1e-3), max.max(1e-3));
    let mut svg = Svg::new(WIDTH, HEIGHT);
    draw_axes(&mut svg, &scale, axis);
    for group in groups {
        let points = (0..=STEPS).filter_map(|step| {
            let share = step as f64 / STEPS as f64;
            quantile(&group.sorted_s, share).map(|value| point(&scale, value, share))
        });
        svg.polyline(&format!("curve c{} d{}", group.color % 6, group.color), points);
    }
    for strip in 0..STRIPS {
        let width = PLOT.width / STRIPS as f64;
        let value = scale.value((strip as f64 + 0.5) / STRIPS as f64);
        svg.hover(Area { x: PLOT.x + strip as f64 * width, width, ..PLOT }, &tip(value, groups));
    }
    svg.finish(id, title, &description(groups))
}

fn draw_axes(svg: &mut Svg, scale: &Scale, axis: &str) {
    for percent in [0, 25, 50, 75, 100] {
        let (_, y) = point(scale, 0.0, f64::from(percent) / 100.0);
        svg.line("grid", (PLOT.x, y), (PLOT.x + PLOT.width, y));
        svg.text("tick", Anchor::End, (PLOT.x - 8.0, y + 4.0), &format!("{percent} %"));
    }
    let bottom = PLOT.y + PLOT.height;
    for tick in scale.ticks(14) {
        let (x, _) = point(scale, tick, 0.0);
        svg.line("grid", (x, PLOT.y), (x, bottom));
        svg.text("tick", Anchor::Middle, (x, bottom + 18.0), &plain(tick));
    }
    svg.text("axis", Anchor::Middle, (PLOT.x + PLOT.width / 2.0, bottom + 40.0), axis);
}

fn point(scale: &Scale, value: f64, share: f64) -> (f64, f64) {
    (PLOT.x + scale.at(value) * PLOT.width, PLOT.y + (1.0 - share) * PLOT.height)
}

/// What the pointer shows at a time.
fn tip(value: f64, groups: &[Distribution]) -> String {
    let mut tip = format!("within {} s", seconds(value));
    for group in groups.iter().filter(|group| !group.sorted_s.is_empty()) {
        let within = group.sorted_s.partition_point(|&other| other <= value);
        let share = 100.0 * within as f64 / group.sorted_s.len() as f64;
        tip.push_str(&format!("\n{}: {share:.0} %", group.name));
    }
    tip
}

fn description(groups: &[Distribution]) -> String {
    let medians = groups.iter().map(|group| match quantile(&group.sorted_s, 0.5) {
        Some(median) => format!("{}: median {} s of {}", group.name, seconds(median), group.sorted_s.len()),
        None => format!("{}: no values", group.name),
    });
    medians.collect::<Vec<_>>().join("; ")
}
