//! A small SVG writer: shapes, text and the areas that show values under the pointer. Colours are
//! classes that the page's style sheet defines, so that light and dark share one picture.

use std::fmt::{Display, Write};

/// A picture under construction. Lengths are CSS pixels at the picture's natural size.
#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// Where text stands relative to its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It is centred there.
    Middle,
    End,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Area {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Svg {
        Svg { width, height, body: String::new() }
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(format_args!(
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        ));
    }

    /// A line through points; nothing with fewer than two.
    pub fn polyline(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        let mut path = String::new();
        for (x, y) in points {
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        if path.matches(' ').count() > 1 {
            self.push(format_args!(r#"<polyline class="{class}" points="{}"/>"#, path.trim_end()));
        }
    }

    /// A filled rectangle that shows `tip` under the pointer.
    pub fn bar(&mut self, class: &str, area: Area, tip: &str) {
        let Area { x, y, width, height } = area;
        self.push(format_args!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" data-tip="{}"/>"#,
            escape(tip)
        ));
    }

    /// A filled circle that shows `tip` under the pointer.
    pub fn dot(&mut self, class: &str, (x, y): (f64, f64), radius: f64, tip: &str) {
        self.push(format_args!(
            r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="{radius}" data-tip="{}"/>"#,
            escape(tip)
        ));
    }

    /// An invisible rectangle that shows `tip` under the pointer.
    pub fn hover(&mut self, area: Area, tip: &str) {
        self.bar("hover", area, tip);
    }

    /// Text on one line.
    pub fn text(&mut self, class: &str, anchor: Anchor, at: (f64, f64), text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let ((x, y), text) = (at, escape(text));
        self.push(format_args!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        ));
    }

    /// The finished picture. `id` is unique on the page; `title` names the picture and
    /// `description` says in a sentence what it shows, for readers who cannot see it.
    pub fn finish(self, id: &str, title: &str, description: &str) -> String {
        let Svg { width, height, body } = self;
        let (title, description) = (escape(title), escape(description));
        format!(
            "<svg id=\"{id}\" role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" viewBox=\"0 0 {width:.0} \
             {height:.0}\" style=\"max-width:{width:.0}px\">\n<title id=\"{id}-title\">{title}</title>\n\
             <desc id=\"{id}-desc\">{description}</desc>\n{body}</svg>\n"
        )
    }

    fn push(&mut self, element: std::fmt::Arguments) {
        let _ = writeln!(self.body, "{element}");
    }
}

/// Text that is safe within HTML and within a quoted attribute.
pub fn escape(text: impl Display) -> String {
    let mut escaped = String::new();
    for letter in text.to_string().chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' => escaped.push_str("&#10;"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// A name in at most `letters_max` letters: a longer one loses its middle, because both ends tell
/// names apart.
pub fn shortened(name: &str, letters_max: usize) -> String {
    let letters = name.chars().count();
    if letters <= letters_max {
        return name.to_owned();
    }
    let tail = (letters_max - 1) / 2;
    let head = letters_max - 1 - tail;
    name.chars().take(head).chain(['\u{2026}']).chain(name.chars().skip(letters - tail)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_keeps_both_ends() {
        assert_eq!(shortened("engine-0", 8), "engine-0");
        assert_eq!(shortened("memory to engine-12", 12), "memory\u{2026}ne-12");
        assert_eq!(shortened("äöüäöü", 4).chars().count(), 4);
    }

    #[test]
    fn names_from_a_log_cannot_become_markup() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text("tick", Anchor::Start, (0.0, 0.0), "<script>\"&'");
        svg.hover(Area { x: 0.0, y: 0.0, width: 1.0, height: 1.0 }, "a\n\"b\"");
        let page = svg.finish("p", "</title>", "d");
        assert!(page.contains("&lt;script&gt;&quot;&amp;&#39;"));
        assert!(page.contains(r#"data-tip="a&#10;&quot;b&quot;""#));
        assert!(page.contains("&lt;/title&gt;</title>"));
    }
}
