//! How wholes are split into parts: one bar of full length per whole.

use super::svg::{Anchor, Area, Svg, shortened};
use crate::units::short_count;

#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    pub name: String,
    /// The amounts of its parts, in the order of the names given to [`sources`].
    pub parts: Vec<u64>,
}

const WIDTH: f64 = 960.0;
const NAME_WIDTH: f64 = 140.0;
const ROW: f64 = 34.0;
const BAR: f64 = 22.0;
const TOP: f64 = 6.0;
/// A label needs this share of the bar to fit into it.
const LABEL_SHARE: f64 = 0.06;

/// One bar per whole, its parts side by side. `parts` names them. `id` is unique on the page.
pub fn sources(id: &str, title: &str, axis: &str, parts: &[&str], wholes: &[Split]) -> String {
    let bottom = TOP + ROW * wholes.len() as f64;
    let mut svg = Svg::new(WIDTH, bottom + 46.0);
    let width = WIDTH - NAME_WIDTH - 28.0;
    for percent in [0, 25, 50, 75, 100] {
        let x = NAME_WIDTH + width * f64::from(percent) / 100.0;
        svg.line("grid", (x, TOP), (x, bottom));
        svg.text("tick", Anchor::Middle, (x, bottom + 16.0), &format!("{percent} %"));
    }
    svg.text("axis", Anchor::Middle, (NAME_WIDTH + width / 2.0, bottom + 38.0), axis);
    for (row, whole) in wholes.iter().enumerate() {
        let y = TOP + ROW * row as f64 + (ROW - BAR) / 2.0;
        svg.text("name", Anchor::End, (NAME_WIDTH - 10.0, y + BAR / 2.0 + 4.0), &shortened(&whole.name, 16));
        draw_parts(&mut svg, parts, whole, y, width);
    }
    svg.finish(id, title, &description(parts, wholes))
}

fn draw_parts(svg: &mut Svg, parts: &[&str], whole: &Split, y: f64, width: f64) {
    let mut x = NAME_WIDTH;
    for (index, (part, &amount)) in parts.iter().zip(&whole.parts).enumerate() {
        let share = share(amount, whole);
        if amount == 0 {
            continue;
        }
        let area = Area { x, y, width: share * width, height: BAR };
        let label = percent(share);
        svg.bar(
            &format!("s{index}"),
            area,
            &format!("{}\n{part}: {label}, {} tokens", whole.name, short_count(amount)),
        );
        if share >= LABEL_SHARE {
            let at = (x + area.width / 2.0, y + BAR / 2.0 + 4.0);
            svg.text(&format!("on-s{index}"), Anchor::Middle, at, &label);
        }
        x += area.width;
    }
}

fn share(amount: u64, whole: &Split) -> f64 {
    amount as f64 / whole.parts.iter().sum::<u64>().max(1) as f64
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn description(parts: &[&str], wholes: &[Split]) -> String {
    let bars = wholes.iter().map(|whole| {
        let shares = parts.iter().zip(&whole.parts);
        let shares: Vec<String> =
            shares.map(|(part, &amount)| format!("{part} {}", percent(share(amount, whole)))).collect();
        format!("{}: {}", whole.name, shares.join(", "))
    });
    bars.collect::<Vec<_>>().join("; ")
}
