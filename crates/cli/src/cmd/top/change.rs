//! What a process counts, read from its page, and how fast it changes. Pure.

use forebay_router::prometheus_text;
use std::collections::{BTreeMap, HashMap};

/// A label's name and value.
pub type Label<'a> = (&'a str, &'a str);

/// A page of metrics.
#[derive(Debug, Default)]
pub struct Snapshot {
    series: HashMap<String, Vec<Series>>,
}

#[derive(Debug)]
struct Series {
    labels: Vec<(String, String)>,
    value: f64,
}

/// A page, and the one before it with how many seconds lie between them.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    pub now: &'a Snapshot,
    pub before: Option<(&'a Snapshot, f64)>,
}

impl Snapshot {
    /// Reads a page. What is no number is left out.
    pub fn read(page: &[u8]) -> Snapshot {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut snapshot = Snapshot::default();
        for sample in prometheus_text::samples(page) {
            let Some(value) = sample.number().filter(|value| value.is_finite()) else { continue };
            let labels = sample.labels().map(|(name, value)| (text(name), text(value))).collect();
            snapshot.series.entry(text(sample.name)).or_default().push(Series { labels, value });
        }
        snapshot
    }

    /// Whether a name begins like this.
    pub fn has(&self, prefix: &str) -> bool {
        self.series.keys().any(|name| name.starts_with(prefix))
    }

    /// The sum of all series with these labels; `None` where there is none.
    pub fn sum(&self, name: &str, labels: &[Label]) -> Option<f64> {
        let fits = |series: &&Series| labels.iter().all(|(label, value)| series.label(label) == Some(*value));
        let mut values = self.series.get(name)?.iter().filter(fits).map(|series| series.value).peekable();
        values.peek()?;
        Some(values.sum())
    }

    /// The values of a label.
    pub fn values(&self, name: &str, label: &str) -> Vec<&str> {
        let series = self.series.get(name).into_iter().flatten();
        let mut values: Vec<&str> = series.filter_map(|series| series.label(label)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }
}

impl Series {
    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(known, _)| known == name).map(|(_, value)| &value[..])
    }
}

impl Change<'_> {
    pub fn gauge(&self, name: &str, labels: &[Label]) -> Option<f64> {
        self.now.sum(name, labels)
    }

    /// How much a counter grew each second; `None` where that is not known, as when the process
    /// began anew.
    pub fn rate(&self, name: &str, labels: &[Label]) -> Option<f64> {
        let (before, seconds) = self.before.filter(|(_, seconds)| *seconds > 0.0)?;
        let grown = self.now.sum(name, labels)? - before.sum(name, labels).unwrap_or(0.0);
        (grown >= 0.0).then_some(grown / seconds)
    }

    /// What part one counter's growth was of another's; of all that was counted where nothing grew.
    pub fn share(&self, part: &str, whole: &str, labels: &[Label]) -> Option<f64> {
        let of = |part: f64, whole: f64| (whole > 0.0).then_some(part / whole);
        let lately = self.rate(part, labels).zip(self.rate(whole, labels));
        let ever = || of(self.gauge(part, labels)?, self.gauge(whole, labels)?);
        lately.and_then(|(part, whole)| of(part, whole)).or_else(ever)
    }

    /// The series of a counter that grow, by their labels, the fastest first.
    pub fn growing(&self, name: &str) -> Vec<(String, f64)> {
        let mut rates = BTreeMap::new();
        for series in self.now.series.get(name).into_iter().flatten() {
            let labels: Vec<Label> =
                series.labels.iter().map(|(name, value)| (&name[..], &value[..])).collect();
            let words: Vec<&str> = labels.iter().map(|(_, value)| *value).collect();
            if let Some(rate) = self.rate(name, &labels).filter(|rate| *rate > 0.0) {
                rates.insert(words.join(" "), rate);
            }
        }
        let mut rates: Vec<(String, f64)> = rates.into_iter().collect();
        rates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Snapshot {
        Snapshot::read(text.as_bytes())
    }

    #[test]
    fn rates_are_of_the_time_between_two_pages_and_unknown_after_a_new_start() {
        let before = read("# TYPE a_total counter\na_total{tier=\"x\"} 10\na_total{tier=\"y\"} 1\nb 5\n");
        let now = read("a_total{tier=\"x\"} 30\na_total{tier=\"y\"} 2\nb 4\n");
        let change = Change { now: &now, before: Some((&before, 2.0)) };
        assert_eq!(change.rate("a_total", &[("tier", "x")]), Some(10.0));
        assert_eq!(change.rate("a_total", &[]), Some(10.5));
        assert_eq!(change.rate("b", &[]), None, "it began anew");
        assert_eq!((change.rate("c", &[]), change.gauge("c", &[])), (None, None));
        assert_eq!(Change { now: &now, before: None }.rate("a_total", &[]), None);
        assert_eq!(change.growing("a_total"), [("x".to_owned(), 10.0), ("y".to_owned(), 0.5)]);
    }

    #[test]
    fn shares_are_of_lately_and_of_all_where_nothing_happened() {
        let before = read("hits 10\nqueries 100\n");
        let share =
            |now: &Snapshot| Change { now, before: Some((&before, 1.0)) }.share("hits", "queries", &[]);
        assert_eq!(share(&read("hits 15\nqueries 110\n")), Some(0.5));
        assert_eq!(share(&read("hits 10\nqueries 100\n")), Some(0.1));
        assert_eq!(share(&read("hits 0\nqueries 0\n")), None);
    }

    #[test]
    fn a_page_with_nonsense_keeps_the_rest() {
        let page = read("a NaN\nb{x=\"1\" 3\n} } }\n\nc 2\nd{x=\"q\\\"q\"} +Inf\n");
        assert_eq!((page.sum("a", &[]), page.sum("c", &[]), page.sum("d", &[])), (None, Some(2.0), None));
    }
}
