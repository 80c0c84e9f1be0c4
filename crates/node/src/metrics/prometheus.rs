//! Metrics as Prometheus's text. This file turns what was gathered into what `prometheus-client`
//! writes.

use super::{Kind, Metric, Value};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::fmt;

pub(super) use prometheus_text::CONTENT_TYPE;

/// The text. Numbers of one name stand together, whatever their order was.
pub fn render(metrics: Vec<Metric>) -> String {
    let mut text = String::with_capacity(metrics.len() * 96);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Gathered(metrics)));
    // Neither a String nor a gathered metric refuses anything.
    let _ = prometheus_text::encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Gathered(Vec<Metric>);

impl Collector for Gathered {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families: BTreeMap<&str, Vec<&Metric>> = BTreeMap::new();
        for metric in &self.0 {
            families.entry(metric.family.name).or_default().push(metric);
        }
        for (name, metrics) in families {
            let family = metrics[0].family;
            let (name, kind) = match family.kind {
                // The encoder adds it again.
                Kind::Counter => (name.strip_suffix("_total").unwrap_or(name), MetricType::Counter),
                Kind::Gauge => (name, MetricType::Gauge),
                Kind::Histogram => (name, MetricType::Histogram),
            };
            let mut encoder = encoder.encode_descriptor(name, family.help, None, kind)?;
            for metric in metrics {
                encode(metric, encoder.encode_family(&metric.labels)?)?;
            }
        }
        Ok(())
    }
}

/// What an exemplar would be labelled with, if there were any.
type NoLabels = [(&'static str, &'static str); 0];

const NO_EXEMPLAR: Option<&Exemplar<NoLabels, u64>> = None;

fn encode(metric: &Metric, mut encoder: MetricEncoder<'_>) -> fmt::Result {
    match &metric.value {
        Value::Histogram(histogram) => {
            let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(histogram.counts.iter().copied()).collect();
            let count = histogram.counts.iter().sum();
            encoder.encode_histogram::<NoLabels>(histogram.sum, count, &buckets, None)
        }
        // Whole numbers are written without a point.
        Value::Number(number) => match metric.family.kind {
            Kind::Counter if is_whole(*number) && *number >= 0.0 => {
                encoder.encode_counter(&(*number as u64), NO_EXEMPLAR)
            }
            Kind::Counter => encoder.encode_counter(number, NO_EXEMPLAR),
            _ if is_whole(*number) => encoder.encode_gauge(&(*number as i64)),
            _ => encoder.encode_gauge(number),
        },
    }
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0 && number.abs() < i64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Family, Histogram};
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
        let all = vec![bytes("a"), seconds, bytes("b"), no_label, Metric::new(&BYTES, &[], 1e18)];
        let text = render(all);
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
            let text = render(vec![metric.clone(), metric]);
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
