//! Metrics as Prometheus text, version 0.0.4. Pure: this file knows the format; it must never know who asks.

use super::{Family, Histogram, Kind, Metric, Value};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What the text is, for the header of an answer.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text. Numbers of one name stand together, whatever their order was.
pub fn render(metrics: &[Metric]) -> String {
    let mut families: BTreeMap<&str, Vec<&Metric>> = BTreeMap::new();
    for metric in metrics {
        families.entry(metric.family.name).or_default().push(metric);
    }
    let mut text = String::with_capacity(metrics.len() * 96);
    for (_, metrics) in families {
        put_head(&mut text, metrics[0].family);
        metrics.iter().for_each(|metric| put_metric(&mut text, metric));
    }
    text
}

fn put_head(text: &mut String, family: &Family) {
    let kind = match family.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    let help = family.help.replace('\\', r"\\").replace('\n', r"\n");
    let _ = writeln!(text, "# HELP {} {help}\n# TYPE {} {kind}", family.name, family.name);
}

fn put_metric(text: &mut String, metric: &Metric) {
    let name = metric.family.name;
    match &metric.value {
        Value::Number(value) => put_line(text, name, "", &metric.labels, None, *value),
        Value::Histogram(histogram) => put_histogram(text, name, &metric.labels, histogram),
    }
}

/// Buckets hold all observations up to their bound; the last has no bound.
fn put_histogram(text: &mut String, name: &str, labels: &[(&str, String)], histogram: &Histogram) {
    let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
    let mut count = 0;
    for (bound, &more) in bounds.zip(&histogram.counts) {
        count += more;
        put_line(text, name, "_bucket", labels, Some(bound), count as f64);
    }
    put_line(text, name, "_sum", labels, None, histogram.sum);
    put_line(text, name, "_count", labels, None, count as f64);
}

fn put_line(
    text: &mut String,
    name: &str,
    suffix: &str,
    labels: &[(&str, String)],
    bound: Option<f64>,
    value: f64,
) {
    let _ = write!(text, "{name}{suffix}");
    let mut separator = '{';
    for (label, value) in labels {
        let _ = write!(text, "{separator}{label}=\"");
        value.chars().for_each(|character| put_escaped(text, character));
        text.push('"');
        separator = ',';
    }
    if let Some(bound) = bound {
        let _ = write!(text, "{separator}le=\"{}\"", Number(bound));
        separator = ',';
    }
    let end = if separator == '{' { "" } else { "}" };
    let _ = writeln!(text, "{end} {}", Number(value));
}

fn put_escaped(text: &mut String, character: char) {
    match character {
        '\\' => text.push_str(r"\\"),
        '"' => text.push_str("\\\""),
        '\n' => text.push_str(r"\n"),
        other => text.push(other),
    }
}

/// A number as Prometheus reads it.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            f64::INFINITY => f.write_str("+Inf"),
            f64::NEG_INFINITY => f.write_str("-Inf"),
            number => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: Family = Family { name: "forebay_bytes_total", help: "A\\B\nC", kind: Kind::Counter };
    const SECONDS: Family = Family { name: "forebay_seconds", help: "Time.", kind: Kind::Histogram };

    /// A line that is not a comment: name, labels and value. A strict reader of the format.
    fn parse_line(line: &str) -> (String, Vec<(String, String)>, f64) {
        let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let end = line.find(|character| !is_name(character)).unwrap();
        let (name, mut rest) = line.split_at(end);
        let mut labels = Vec::new();
        if let Some(mut inside) = rest.strip_prefix('{') {
            loop {
                let (label, after) = inside.split_once("=\"").unwrap();
                assert!(!label.is_empty() && label.chars().all(is_name), "{label:?} is no label");
                let (value, after) = parse_value(after);
                labels.push((label.to_owned(), value));
                match after.split_at(1) {
                    (",", more) => inside = more,
                    ("}", more) => break rest = more,
                    other => panic!("{other:?} after a label"),
                }
            }
        }
        let value = rest.strip_prefix(' ').unwrap();
        let value = match value {
            "+Inf" => f64::INFINITY,
            "-Inf" => f64::NEG_INFINITY,
            value => value.parse().unwrap(),
        };
        (name.to_owned(), labels, value)
    }

    /// A quoted value, and what follows the quote.
    fn parse_value(text: &str) -> (String, &str) {
        let (mut value, mut characters) = (String::new(), text.char_indices());
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => return (value, &text[at + 1..]),
                '\\' => value.push(match characters.next().unwrap().1 {
                    'n' => '\n',
                    escaped @ ('\\' | '"') => escaped,
                    other => panic!("{other:?} is not escaped"),
                }),
                other => value.push(other),
            }
        }
        panic!("a value does not end");
    }

    #[test]
    fn histograms_are_cumulative_and_families_stand_together() {
        let histogram = Histogram { bounds: vec![0.5, 2.0], counts: vec![3, 0, 1], sum: 7.5 };
        let of = |peer: &str| vec![("peer", peer.to_owned())];
        let seconds =
            Metric { family: &SECONDS, labels: of("a"), value: Value::Histogram(histogram.clone()) };
        let no_label = Metric { family: &SECONDS, labels: Vec::new(), value: Value::Histogram(histogram) };
        let bytes = |peer| Metric::new(&BYTES, &[("peer", peer)], 3.0);
        let text = render(&[bytes("a"), seconds, bytes("b"), no_label, Metric::new(&BYTES, &[], 1e18)]);
        let expected = r#"# HELP forebay_bytes_total A\\B\nC
# TYPE forebay_bytes_total counter
forebay_bytes_total{peer="a"} 3
forebay_bytes_total{peer="b"} 3
forebay_bytes_total 1000000000000000000
# HELP forebay_seconds Time.
# TYPE forebay_seconds histogram
forebay_seconds_bucket{peer="a",le="0.5"} 3
forebay_seconds_bucket{peer="a",le="2"} 3
forebay_seconds_bucket{peer="a",le="+Inf"} 4
forebay_seconds_sum{peer="a"} 7.5
forebay_seconds_count{peer="a"} 4
forebay_seconds_bucket{le="0.5"} 3
forebay_seconds_bucket{le="2"} 3
forebay_seconds_bucket{le="+Inf"} 4
forebay_seconds_sum 7.5
forebay_seconds_count 4
"#;
        assert_eq!(text, expected);
    }

    proptest! {
        #[test]
        fn whatever_labels_and_numbers_are_they_are_read_back(
            values in prop::collection::vec(any::<String>(), 0..4),
            special in "[\\\\\"\n,={} ]{0,12}",
            number in any::<f64>(),
        ) {
            let names = ["a", "b", "c", "d", "e"];
            let values = values.into_iter().chain([special]);
            let labels: Vec<_> = names.into_iter().zip(values).collect();
            let metric = Metric { family: &BYTES, labels: labels.clone(), value: Value::Number(number) };
            let text = render(&[metric.clone(), metric]);
            prop_assert!(text.ends_with('\n'));
            let lines: Vec<&str> = text.trim_end_matches('\n').split('\n').collect();
            prop_assert_eq!(lines.len(), 4);
            let (name, read, value) = parse_line(lines[2]);
            prop_assert_eq!(name, BYTES.name);
            let labels: Vec<_> = labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            prop_assert_eq!(read, labels);
            prop_assert!(value == number || (value.is_nan() && number.is_nan()));
        }
    }
}
