//! What was chosen over time: one panel per arm, a bar per interval with a part for each kind of
//! choice.

use super::scale::Scale;
use super::svg::{Anchor, Area, Svg, shortened};

#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    pub name: String,
    /// A few words beside the name; may be empty.
    pub note: String,
    /// Model seconds, and the place of what was chosen among the names given to [`choices`].
    pub choices: Vec<(f64, usize)>,
}

const WIDTH: f64 = 470.0;
const HEIGHT: f64 = 210.0;
const PLOT: Area = Area { x: 48.0, y: 30.0, width: 410.0, height: 130.0 };
const INTERVALS: usize = 32;
/// Between two bars.
const GAP: f64 = 2.0;

/// One picture per arm, all with the same axes. `id` is unique on the page.
pub fn choices(id: &str, names: &[&str], arms: &[Chosen]) -> Vec<String> {
    let end_s = arms.iter().flat_map(|arm| &arm.choices).map(|choice| choice.0).fold(1.0, f64::max);
    let counted: Vec<Vec<Vec<usize>>> = arms.iter().map(|arm| count(arm, names.len(), end_s)).collect();
    let most = counted.iter().flatten().map(|interval| interval.iter().sum::<usize>()).max().unwrap_or(0);
    let (time, number) = (Scale::Linear { max: end_s }, Scale::linear(most as f64, 4));
    let arms = arms.iter().zip(&counted).enumerate();
    arms.map(|(index, (arm, counts))| draw(&format!("{id}-{index}"), names, arm, counts, &time, &number))
        .collect()
}

/// How many of each kind there are in each interval.
fn count(arm: &Chosen, kinds: usize, end_s: f64) -> Vec<Vec<usize>> {
    let mut counts = vec![vec![0; kinds]; INTERVALS];
    for &(at_s, kind) in &arm.choices {
        let interval = (at_s / end_s * INTERVALS as f64) as usize;
        counts[interval.min(INTERVALS - 1)][kind] += 1;
    }
    counts
}

fn draw(
    id: &str,
    names: &[&str],
    arm: &Chosen,
    counts: &[Vec<usize>],
    time: &Scale,
    number: &Scale,
) -> String {
    let mut svg = Svg::new(WIDTH, HEIGHT);
    svg.text("name", Anchor::Start, (PLOT.x, 16.0), &shortened(&arm.name, 22));
    svg.text("tick", Anchor::End, (PLOT.x + PLOT.width, 16.0), &arm.note);
    draw_axes(&mut svg, time, number);
    let step = PLOT.width / INTERVALS as f64;
    for (interval, kinds) in counts.iter().enumerate() {
        let x = PLOT.x + interval as f64 * step;
        let mut below = 0;
        for (kind, &chosen) in kinds.iter().enumerate().filter(|(_, chosen)| **chosen > 0) {
            let (bottom, top) = (number.at(below as f64), number.at((below + chosen) as f64));
            let (y, height) = (PLOT.y + (1.0 - top) * PLOT.height, (top - bottom) * PLOT.height);
            let area = Area { x: x + GAP / 2.0, y, width: step - GAP, height };
            svg.bar(&format!("s{kind}"), area, "");
            below += chosen;
        }
        let from_s = time.value(interval as f64 / INTERVALS as f64);
        svg.hover(Area { x, width: step, ..PLOT }, &tip(from_s, names, kinds));
    }
    svg.finish(id, &format!("Choices over time, {}", arm.name), &description(names, arm))
}

fn draw_axes(svg: &mut Svg, time: &Scale, number: &Scale) {
    let bottom = PLOT.y + PLOT.height;
    for tick in number.ticks(4) {
        let y = PLOT.y + (1.0 - number.at(tick)) * PLOT.height;
        svg.line("grid", (PLOT.x, y), (PLOT.x + PLOT.width, y));
        svg.text("tick", Anchor::End, (PLOT.x - 8.0, y + 4.0), &format!("{tick}"));
    }
    for tick in time.ticks(8) {
        let x = PLOT.x + time.at(tick) * PLOT.width;
        svg.text("tick", Anchor::Middle, (x, bottom + 17.0), &format!("{tick}"));
    }
    let middle = PLOT.x + PLOT.width / 2.0;
    svg.text("axis", Anchor::Middle, (middle, bottom + 37.0), "decisions over model time (s)");
}

/// What the pointer shows of an interval.
fn tip(from_s: f64, names: &[&str], kinds: &[usize]) -> String {
    let mut tip = format!("from {from_s:.0} s");
    for (name, chosen) in names.iter().zip(kinds).filter(|(_, chosen)| **chosen > 0) {
        tip.push_str(&format!("\n{name}: {chosen}"));
    }
    tip
}

fn description(names: &[&str], arm: &Chosen) -> String {
    let kinds = names.iter().enumerate().map(|(place, name)| {
        let chosen = arm.choices.iter().filter(|(_, kind)| *kind == place).count();
        format!("{name}: {chosen}")
    });
    kinds.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_choice_is_in_the_interval_of_its_time() {
        let choices = vec![(0.0, 0), (63.9, 1), (64.0, 1), (3.0, 0)];
        let counts = count(&Chosen { name: String::new(), note: String::new(), choices }, 2, 64.0);
        assert_eq!((counts[0].clone(), counts[1].clone()), (vec![1, 0], vec![1, 0]));
        assert_eq!(counts[INTERVALS - 1], [0, 2], "the last moment is in the last interval");
        assert_eq!(counts.iter().flatten().sum::<usize>(), 4);
    }
}
