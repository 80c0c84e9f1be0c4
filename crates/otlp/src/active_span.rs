//! One sampled piece of work while it is under way: its span, the stages that it goes through one
//! after the other, and the parts of it that are spans of their own.

use super::push::unix_ns;
use super::{Span, SpanKind, Spans};
use forebay_transfer::TraceContext;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

/// Work that is traced. It is over when this is dropped; where it broke off the stages after that
/// are missing.
#[derive(Debug)]
pub struct ActiveSpan {
    spans: Arc<Spans>,
    started: Instant,
    /// What is over, and how long after the start.
    stages: Vec<(&'static str, u64)>,
    span: Span,
}

impl ActiveSpan {
    /// Begins, if this one is sampled: as its parent says, if it has one.
    pub fn begin(
        spans: &Arc<Spans>,
        parent: Option<TraceContext>,
        name: &'static str,
        kind: SpanKind,
    ) -> Option<ActiveSpan> {
        spans.wants(parent).then(|| {
            let trace = parent.map_or_else(draw_trace, |parent| parent.trace);
            ActiveSpan::start(spans, trace, parent.map(|parent| parent.span), name, kind)
        })
    }

    /// A part of it, which begins now.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> ActiveSpan {
        ActiveSpan::start(&self.spans, self.span.trace, Some(self.span.id), name, kind)
    }

    fn start(
        spans: &Arc<Spans>,
        trace: [u8; 16],
        parent: Option<[u8; 8]>,
        name: &'static str,
        kind: SpanKind,
    ) -> ActiveSpan {
        let start_unix_ns = unix_ns();
        let span = Span {
            trace,
            id: draw().to_be_bytes(),
            parent,
            name,
            kind,
            start_unix_ns,
            end_unix_ns: start_unix_ns,
            attributes: Vec::new(),
            events: Vec::new(),
            error: None,
        };
        ActiveSpan { spans: Arc::clone(spans), started: Instant::now(), stages: Vec::new(), span }
    }

    /// What others are told who do a part of it.
    pub fn context(&self) -> TraceContext {
        TraceContext { trace: self.span.trace, span: self.span.id, sampled: true }
    }

    /// What tells it from others.
    pub fn note(&mut self, name: &'static str, value: impl ToString) {
        self.span.attributes.push((name, value.to_string()));
    }

    /// Something happens now.
    pub fn event(&mut self, name: &'static str) {
        self.span.events.push((name, self.now_unix_ns()));
    }

    /// A stage is over; it began when the one before it was.
    pub fn passed(&mut self, stage: &'static str) {
        self.stages.push((stage, self.now_unix_ns()));
    }

    pub fn fail(&mut self, why: &str) {
        self.span.error = Some(why.to_owned());
    }

    /// By the wall clock of the start: a clock that is set meanwhile lengthens nothing.
    fn now_unix_ns(&self) -> u64 {
        let elapsed_ns = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.span.start_unix_ns.saturating_add(elapsed_ns)
    }
}

impl Drop for ActiveSpan {
    fn drop(&mut self) {
        self.span.end_unix_ns = self.now_unix_ns();
        let mut since = self.span.start_unix_ns;
        for &(name, at_unix_ns) in &self.stages {
            self.spans.put(Span {
                id: draw().to_be_bytes(),
                parent: Some(self.span.id),
                name,
                kind: SpanKind::Internal,
                start_unix_ns: since,
                end_unix_ns: at_unix_ns,
                events: Vec::new(),
                error: None,
                ..self.span.clone()
            });
            since = at_unix_ns;
        }
        self.spans.put(self.span.clone());
    }
}

fn draw_trace() -> [u8; 16] {
    (u128::from(draw()) << 64 | u128::from(draw())).to_be_bytes()
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
        let begin = || ActiveSpan::begin(&spans, None, "pull", SpanKind::Internal);
        assert!(begin().is_none(), "nothing is sampled");
        spans.export_one_of(1);
        let mut pull = begin().unwrap();
        pull.note("peer", "left");
        pull.passed("lent");
        pull.passed("queued");
        pull.fail("the peer is frozen");
        drop(pull);
        let [lent, queued, whole] = &spans.take()[..] else { panic!("three spans") };
        assert_eq!((lent.name, queued.name, whole.name), ("lent", "queued", "pull"));
        assert_eq!((lent.parent, queued.parent, whole.parent), (Some(whole.id), Some(whole.id), None));
        assert!(lent.trace == whole.trace && queued.trace == whole.trace && lent.id != queued.id);
        assert_eq!((lent.start_unix_ns, lent.end_unix_ns), (whole.start_unix_ns, queued.start_unix_ns));
        assert!(queued.end_unix_ns <= whole.end_unix_ns);
        assert_eq!(whole.attributes, [("peer", "left".to_owned())]);
        assert_eq!((lent.error.as_deref(), whole.error.as_deref()), (None, Some("the peer is frozen")));
    }

    #[test]
    fn parts_hang_below_whoever_asked_in_the_same_trace() {
        let spans = Arc::new(Spans::default());
        spans.export_one_of(0);
        let parent = TraceContext { trace: [3; 16], span: [4; 8], sampled: true };
        let mut request = ActiveSpan::begin(&spans, Some(parent), "request", SpanKind::Server).unwrap();
        let attempt = request.child("attempt", SpanKind::Client);
        let told = attempt.context();
        request.event("first-byte");
        drop((attempt, request));
        let [attempt, request] = &spans.take()[..] else { panic!("two spans") };
        assert_eq!((request.trace, request.parent), ([3; 16], Some([4; 8])));
        assert_eq!((attempt.trace, attempt.parent), ([3; 16], Some(request.id)));
        assert_eq!(told, TraceContext { trace: [3; 16], span: attempt.id, sampled: true });
        let (name, at) = request.events[0];
        assert!(name == "first-byte" && (request.start_unix_ns..=request.end_unix_ns).contains(&at));
    }
}
