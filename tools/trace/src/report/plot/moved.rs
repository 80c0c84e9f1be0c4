//! How many bytes each link moved: one panel per arm, one bar per link.

use super::svg::{Anchor, Area, Svg, shortened};
use crate::units::{bytes, count};

#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    pub name: String,
    /// Per link its name, bytes and lots.
    pub links: Vec<(String, u64, u64)>,
}

const WIDTH: f64 = 470.0;
const NAME_WIDTH: f64 = 170.0;
const VALUE_WIDTH: f64 = 64.0;
const ROW: f64 = 24.0;
const BAR: f64 = 14.0;
const TOP: f64 = 28.0;

/// One picture per arm, all with the same scale. `id` is unique on the page.
pub fn moved(id: &str, arms: &[Moved]) -> Vec<String> {
    let most = arms.iter().flat_map(|arm| &arm.links).map(|link| link.1).max().unwrap_or(0).max(1);
    let draw = |(index, arm)| draw_panel(&format!("{id}-{index}"), arm, most);
    arms.iter().enumerate().map(draw).collect()
}

fn draw_panel(id: &str, arm: &Moved, most: u64) -> String {
    let mut svg = Svg::new(WIDTH, TOP + ROW * arm.links.len() as f64 + 8.0);
    svg.text("name", Anchor::Start, (0.0, 16.0), &shortened(&arm.name, 48));
    for (row, (link, moved, lots)) in arm.links.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let middle = y + ROW / 2.0 + 4.0;
        let width = (WIDTH - NAME_WIDTH - VALUE_WIDTH) * *moved as f64 / most as f64;
        let area = Area { x: NAME_WIDTH, y: y + (ROW - BAR) / 2.0, width, height: BAR };
        svg.text("tick", Anchor::End, (NAME_WIDTH - 8.0, middle), &shortened(link, 24));
        svg.bar("moved", area, &format!("{link}\n{}, {} lots", bytes(*moved), count(*lots)));
        svg.text("tick", Anchor::Start, (NAME_WIDTH + width + 6.0, middle), &bytes(*moved));
    }
    svg.finish(id, &format!("Bytes by link, {}", arm.name), &description(arm))
}

fn description(arm: &Moved) -> String {
    let links =
        arm.links.iter().map(|(link, moved, lots)| format!("{link}: {} in {lots} lots", bytes(*moved)));
    links.collect::<Vec<_>>().join("; ")
}
