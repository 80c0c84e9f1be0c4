//! A page of metrics as Prometheus reads it: series with names, labels and values. Pure.

use std::collections::BTreeMap;

/// A series of a page.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// The series of a page. Lines that are none, such as comments, are left out.
pub fn read(text: &str) -> Vec<Series> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(series).collect()
}

fn series(line: &str) -> Option<Series> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => labels(inside)?,
        None => (BTreeMap::new(), rest),
    };
    // A time may stand behind the value.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Series { name: name.to_owned(), labels, value })
}

/// The labels up to the closing brace, and what is behind it.
fn labels(mut text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut found = BTreeMap::new();
    loop {
        text = text.trim_start_matches([',', ' ']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((found, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = quoted(rest)?;
        found.insert(name.to_owned(), value);
        text = rest;
    }
}

/// What stands before the closing quote, and what is behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut is_escaped) = (String::new(), false);
    for (at, character) in text.char_indices() {
        match (is_escaped, character) {
            (true, 'n') => value.push('\n'),
            (true, other) => value.push(other),
            (false, '"') => return Some((value, &text[at + 1..])),
            (false, '\\') => {}
            (false, other) => value.push(other),
        }
        is_escaped = !is_escaped && character == '\\';
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_read_with_labels_escapes_and_times_and_what_is_none_is_left_out() {
        let text = "# HELP a x\n# TYPE a counter\na_total{m=\"q \\\"}\\\\,x\",t=\"1\"} 7 1700\nb 1e3\nc{} 2\n\
                    broken{m=\"x} 1\nd\ne{m=\"x\"} soon\n";
        let read = read(text);
        let names: Vec<&str> = read.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["a_total", "b", "c"]);
        assert_eq!(read[0].labels["m"], "q \"}\\,x");
        assert_eq!((read[0].labels["t"].as_str(), read[0].value), ("1", 7.0));
        assert_eq!((read[1].value, read[2].value), (1_000.0, 2.0));
    }
}
