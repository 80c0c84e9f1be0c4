//! What was predicted against what came: one panel per arm, one dot per answer, both axes
//! logarithmic. On the line a prediction was right.

use super::scale::{Scale, plain};
use super::svg::{Anchor, Area, Svg, shortened};
use crate::units::seconds;

#[derive(Debug, Clone, PartialEq)]
pub struct Predicted {
    pub name: String,
    /// A few words beside the name; may be empty.
    pub note: String,
    /// Seconds that were predicted, and that it took.
    pub times_s: Vec<(f64, f64)>,
}

const WIDTH: f64 = 470.0;
const HEIGHT: f64 = 300.0;
const PLOT: Area = Area { x: 48.0, y: 30.0, width: 410.0, height: 220.0 };
const RADIUS: f64 = 2.5;
/// More dots than this cannot be told apart; of more, every so many-th is shown.
const DOTS_MAX: usize = 300;
/// Times that round to nothing would stretch the axes over decades in which nothing happens.
const SHORTEST_S: f64 = 1e-3;

/// One picture per arm, all with the same axes. `id` is unique on the page.
pub fn scatter(id: &str, arms: &[Predicted]) -> Vec<String> {
    let all = || arms.iter().flat_map(|arm| &arm.times_s).flat_map(|&(a, b)| [a, b]);
    let least_s = all().fold(f64::INFINITY, f64::min).max(SHORTEST_S);
    let scale = Scale::log(least_s, all().fold(least_s, f64::max));
    let draw = |(index, arm)| draw_panel(&format!("{id}-{index}"), arm, &scale);
    arms.iter().enumerate().map(draw).collect()
}

fn draw_panel(id: &str, arm: &Predicted, scale: &Scale) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.text("name", Anchor::Start, (PLOT.x, 16.0), &shortened(&arm.name, 22));
    svg.text("tick", Anchor::End, (PLOT.x + PLOT.width, 16.0), &arm.note);
    draw_axes(&mut svg, scale);
    let step = arm.times_s.len().div_ceil(DOTS_MAX).max(1);
    for &(predicted_s, came_s) in arm.times_s.iter().step_by(step) {
        let tip = format!("predicted {} s\ncame after {} s", seconds(predicted_s), seconds(came_s));
        svg.dot("dot", point(scale, predicted_s, came_s), RADIUS, &tip);
    }
    svg.finish(id, &format!("Predicted and realised time to first token, {}", arm.name), &description(arm))
}

fn draw_axes(svg: &mut Svg, scale: &Scale) {
    let bottom = PLOT.y + PLOT.height;
    for tick in scale.ticks(8) {
        let (x, y) = point(scale, tick, tick);
        svg.line("grid", (x, PLOT.y), (x, bottom));
        svg.line("grid", (PLOT.x, y), (PLOT.x + PLOT.width, y));
        svg.text("tick", Anchor::Middle, (x, bottom + 17.0), &plain(tick));
        svg.text("tick", Anchor::End, (PLOT.x - 8.0, y + 4.0), &plain(tick));
    }
    svg.line("right", (PLOT.x, bottom), (PLOT.x + PLOT.width, PLOT.y));
    let middle = PLOT.x + PLOT.width / 2.0;
    svg.text("axis", Anchor::Middle, (middle, bottom + 37.0), "TTFT realised over predicted (model s)");
}

fn point(scale: &Scale, predicted_s: f64, came_s: f64) -> (f64, f64) {
    (PLOT.x + scale.at(predicted_s) * PLOT.width, PLOT.y + (1.0 - scale.at(came_s)) * PLOT.height)
}

fn description(arm: &Predicted) -> String {
    let later = arm.times_s.iter().filter(|(predicted_s, came_s)| came_s > predicted_s).count();
    format!("{} answers, of which {later} came later than predicted", arm.times_s.len())
}
