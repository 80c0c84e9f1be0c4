//! A picture of rates over sizes: one panel for each way that bytes go, in each the driver's own
//! copies, ours, and the ceiling. Pure: points in, SVG out.

use super::size::Size;
use super::sweep::Point;
use super::way::Course;
use std::fmt::Write;

/// Pixels.
const PANEL_WIDE: f64 = 420.0;
const HIGH: f64 = 340.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 48.0;
/// Lines across a panel at most.
const LINES: f64 = 6.0;

type Rate = fn(&Point) -> f64;
/// What is drawn: name, colour, dashes, rate.
const SERIES: [(&str, &str, &str, Rate); 3] = [
    ("all links at once", "#b45309", "6 4", |point| point.ceiling),
    ("cuMemcpyAsync", "#6b7280", "none", |point| point.native),
    ("Forebay", "#1d4ed8", "none", |point| point.ours),
];

/// The picture; a frame without panels if there are no points.
pub fn svg(points: &[Point]) -> String {
    let courses = [Course::H2d, Course::D2h, Course::Both];
    let of = |course| points.iter().filter(|point| point.course == course).collect::<Vec<_>>();
    let panels: Vec<(Course, Vec<&Point>)> = courses
        .into_iter()
        .map(|course| (course, of(course)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let wide = PANEL_WIDE * panels.len().max(1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {wide} {HIGH}\" width=\"{wide}\" height=\"{HIGH}\" \
         role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#111827\">\n\
         <title>Copies between host memory and one GPU: GB/s over bytes of a copy</title>\n\
         <rect width=\"{wide}\" height=\"{HIGH}\" fill=\"#ffffff\"/>\n"
    );
    legend(&mut out);
    for (nth, (course, points)) in panels.iter().enumerate() {
        Panel::new(PANEL_WIDE * nth as f64, *course, points).draw(&mut out);
    }
    out + "</svg>\n"
}

/// Adds to the picture. Writing to a string does not fail.
macro_rules! put {
    ($out:expr, $($text:tt)*) => { let _ = writeln!($out, $($text)*); };
}

fn legend(out: &mut String) {
    for ((name, colour, dashes, _), nth) in SERIES.iter().zip(0..) {
        let left = [194.0, LEFT, 334.0][nth];
        let (line_end, text) = (left + 22.0, left + 28.0);
        put!(
            out,
            "<line x1=\"{left}\" y1=\"20\" x2=\"{line_end}\" y2=\"20\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dashes}\"/>\
             <text x=\"{text}\" y=\"24\">{name}</text>"
        );
    }
}

/// One panel: where it is and what its axes span.
struct Panel<'a> {
    left: f64,
    course: Course,
    points: &'a [&'a Point],
    /// Binary logarithms of the smallest and the largest size.
    sizes: (f64, f64),
    /// Between two lines across, and at the top, in GB/s.
    step: f64,
    most: f64,
}

impl Panel<'_> {
    fn new<'a>(left: f64, course: Course, points: &'a [&'a Point]) -> Panel<'a> {
        let logs = || points.iter().map(|point| (point.bytes as f64).log2());
        let sizes = (logs().fold(f64::INFINITY, f64::min), logs().fold(0.0, f64::max));
        // A panel of one size still has a width.
        let sizes = if sizes.1 > sizes.0 { sizes } else { (sizes.0 - 1.0, sizes.1 + 1.0) };
        let rates = points.iter().flat_map(|point| SERIES.iter().map(|(.., rate)| rate(point)));
        let highest = rates.fold(0.0, f64::max).max(1e-9);
        let step = step(highest / LINES);
        Panel { left, course, points, sizes, step, most: (highest / step).ceil() * step }
    }

    fn x(&self, bytes: u64) -> f64 {
        let (least, most) = self.sizes;
        let share = ((bytes as f64).log2() - least) / (most - least);
        self.left + LEFT + share * (PANEL_WIDE - LEFT - RIGHT)
    }

    fn y(&self, rate: f64) -> f64 {
        HIGH - BOTTOM - rate / self.most * (HIGH - TOP - BOTTOM)
    }

    fn draw(&self, out: &mut String) {
        self.frame(out);
        for (_, colour, dashes, rate) in SERIES {
            let at = |point: &&Point| format!("{:.1},{:.1}", self.x(point.bytes), self.y(rate(point)));
            let line: Vec<String> = self.points.iter().map(at).collect();
            put!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dashes}\"/>",
                line.join(" ")
            );
            for point in self.points.iter().filter(|_| dashes == "none") {
                let (x, y) = (self.x(point.bytes), self.y(rate(point)));
                put!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
        }
    }

    fn frame(&self, out: &mut String) {
        let (left, right) = (self.left + LEFT, self.left + PANEL_WIDE - RIGHT);
        let title = match self.course {
            Course::H2d => "to one GPU",
            Course::D2h => "from one GPU",
            Course::Both => "to and from one GPU at once",
        };
        put!(out, "<text x=\"{left}\" y=\"50\" font-weight=\"600\">{title}, GB/s</text>");
        for line in 0..=(self.most / self.step).round() as u32 {
            let rate = f64::from(line) * self.step;
            let (y, text) = (self.y(rate), left - 8.0);
            put!(out, "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#e5e7eb\"/>");
            let decimals = (-self.step.log10().floor()).max(0.0) as usize;
            put!(out, "<text x=\"{text}\" y=\"{:.1}\" text-anchor=\"end\">{rate:.decimals$}</text>", y + 4.0);
        }
        let floor = HIGH - BOTTOM;
        // Beyond eight, sizes would lie on one another.
        let every = self.points.len().div_ceil(8);
        for point in self.points.iter().rev().step_by(every) {
            let (x, size) = (self.x(point.bytes), Size(point.bytes));
            put!(
                out,
                "<line x1=\"{x:.1}\" y1=\"{floor}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#9ca3af\"/>",
                floor + 4.0
            );
            put!(
                out,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" font-size=\"11\">{size}</text>",
                floor + 18.0
            );
        }
        put!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#4b5563\">bytes of a copy</text>",
            (left + right) / 2.0,
            HIGH - 10.0
        );
    }
}

/// The smallest of 1, 2, 5, 10, 20, ... and so on down that is no smaller.
fn step(least: f64) -> f64 {
    let unit = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|times| times * unit)
        .find(|step| *step >= least)
        .unwrap_or(10.0 * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(course: Course, bytes: u64, ours: f64) -> Point {
        Point { course, bytes, native: 55.0, ours, ceiling: 149.0 }
    }

    #[test]
    fn every_point_lies_inside_its_panel() {
        let sizes = [4 << 10, 1 << 20, 1 << 30];
        for points in [&sizes[..], &sizes[..1]] {
            let points: Vec<Point> = points.iter().map(|bytes| point(Course::D2h, *bytes, 148.9)).collect();
            let points: Vec<&Point> = points.iter().collect();
            let panel = Panel::new(PANEL_WIDE, Course::D2h, &points);
            for point in &points {
                assert!((PANEL_WIDE + LEFT..=2.0 * PANEL_WIDE - RIGHT).contains(&panel.x(point.bytes)));
                assert!(
                    (TOP..=HIGH - BOTTOM).contains(&panel.y(point.ceiling)),
                    "{}",
                    panel.y(point.ceiling)
                );
                assert!((TOP..=HIGH - BOTTOM).contains(&panel.y(0.0)));
            }
        }
    }

    #[test]
    fn steps_are_round_and_no_smaller_than_asked() {
        for (least, expected) in [(24.8, 50.0), (1.0, 1.0), (0.3, 0.5), (8.0, 10.0), (0.012, 0.02)] {
            assert!((step(least) - expected).abs() < 1e-9 * expected, "{least}: {}", step(least));
        }
    }

    #[test]
    fn a_way_that_was_not_measured_has_no_panel() {
        let points = [point(Course::H2d, 4096, 20.0), point(Course::H2d, 8192, 30.0)];
        let picture = svg(&points);
        assert_eq!(picture.matches("<polyline").count(), SERIES.len());
        assert!(picture.contains("to one GPU") && !picture.contains("from one GPU"));
        assert!(svg(&[]).ends_with("</svg>\n"));
    }
}
