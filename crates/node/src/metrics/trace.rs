//! One sampled piece of work and the stages that it goes through, one after the other, as spans.

use super::push::unix_ns;
use super::{Span, Spans};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

/// Work that is traced. It is over when this is dropped; where it broke off the stages after that
/// are missing.
#[derive(Debug)]
pub struct Trace {
    spans: Arc<Spans>,
    started: Instant,
    /// What is over, and how long after the start.
    stages: Vec<(&'static str, u64)>,
    whole: Span,
}

impl Trace {
    /// Begins, if this one is sampled.
    pub fn begin(spans: &Arc<Spans>, name: &'static str) -> Option<Trace> {
        spans.wants().then(|| {
            let start_unix_ns = unix_ns();
            let whole = Span {
                trace: (u128::from(draw()) << 64 | u128::from(draw())).to_be_bytes(),
                id: draw().to_be_bytes(),
                parent: None,
                name,
                start_unix_ns,
                end_unix_ns: start_unix_ns,
                attributes: Vec::new(),
                error: None,
            };
            Trace { spans: Arc::clone(spans), started: Instant::now(), stages: Vec::new(), whole }
        })
    }

    /// What tells it from others.
    pub fn note(&mut self, name: &'static str, value: impl ToString) {
        self.whole.attributes.push((name, value.to_string()));
    }

    /// A stage is over; it began when the one before it was.
    pub fn passed(&mut self, stage: &'static str) {
        self.stages.push((stage, self.elapsed_ns()));
    }

    pub fn fail(&mut self, why: &str) {
        self.whole.error = Some(why.to_owned());
    }

    fn elapsed_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let start = self.whole.start_unix_ns;
        let at = |elapsed_ns: u64| start.saturating_add(elapsed_ns);
        self.whole.end_unix_ns = at(self.elapsed_ns());
        let mut since = start;
        for &(name, elapsed_ns) in &self.stages {
            let span = Span {
                id: draw().to_be_bytes(),
                parent: Some(self.whole.id),
                name,
                start_unix_ns: since,
                end_unix_ns: at(elapsed_ns),
                error: None,
                ..self.whole.clone()
            };
            since = span.end_unix_ns;
            self.spans.put(span);
        }
        self.spans.put(self.whole.clone());
    }
}

/// A number that nobody else draws, and never 0, which names nothing. It is no secret.
fn draw() -> u64 {
    RandomState::new().build_hasher().finish() | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_follow_each_other_inside_of_the_whole() {
        let spans = Arc::new(Spans::default());
        assert!(Trace::begin(&spans, "pull").is_none(), "nothing is sampled");
        spans.sample_one_of(1);
        let mut trace = Trace::begin(&spans, "pull").unwrap();
        trace.note("peer", "left");
        trace.passed("lent");
        trace.passed("queued");
        trace.fail("the peer is frozen");
        drop(trace);
        let [lent, queued, whole] = &spans.take()[..] else { panic!("three spans") };
        assert_eq!((lent.name, queued.name, whole.name), ("lent", "queued", "pull"));
        assert_eq!((lent.parent, queued.parent, whole.parent), (Some(whole.id), Some(whole.id), None));
        assert!(lent.trace == whole.trace && queued.trace == whole.trace && lent.id != queued.id);
        assert_eq!((lent.start_unix_ns, lent.end_unix_ns), (whole.start_unix_ns, queued.start_unix_ns));
        assert!(queued.end_unix_ns <= whole.end_unix_ns);
        assert_eq!(whole.attributes, [("peer", "left".to_owned())]);
        assert_eq!((lent.error.as_deref(), whole.error.as_deref()), (None, Some("the peer is frozen")));
    }
}
