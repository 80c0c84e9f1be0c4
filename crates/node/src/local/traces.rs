//! Requests of a client that are traced, from when they are taken until they are answered. This
//! file knows numbers of requests.

use forebay_otlp::{ActiveSpan, SpanKind, Spans};
use forebay_transfer::TraceContext;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Requests of a client that are traced at a time at most; those after are not.
const TRACES_MAX: usize = 64;

#[derive(Debug)]
pub struct Traces {
    spans: Arc<Spans>,
    client: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What requests that are still to come are part of.
    announced: HashMap<u64, TraceContext>,
    open: HashMap<u64, ActiveSpan>,
}

impl Traces {
    pub fn new(spans: Arc<Spans>, client: &str) -> Traces {
        Traces { spans, client: client.to_owned(), state: Mutex::default() }
    }

    /// A request is part of this; it comes next.
    pub fn announce(&self, number: u64, parent: TraceContext) {
        let mut state = self.state.lock();
        if self.spans.is_exported() && state.announced.len() < TRACES_MAX {
            state.announced.insert(number, parent);
        }
    }

    /// A request that will be answered is taken.
    pub fn begin(&self, number: u64, name: &'static str) {
        if !self.spans.is_exported() {
            return;
        }
        let mut state = self.state.lock();
        let parent = state.announced.remove(&number);
        if state.open.len() == TRACES_MAX {
            return;
        }
        let Some(mut span) = ActiveSpan::begin(&self.spans, parent, name, SpanKind::Server) else { return };
        span.note("client", &self.client);
        state.open.insert(number, span);
    }

    /// What parts of a request are told, if it is traced.
    pub fn context(&self, number: u64) -> Option<TraceContext> {
        self.spans.is_exported().then(|| self.state.lock().open.get(&number).map(ActiveSpan::context))?
    }

    /// A part of a request begins, if it is traced.
    pub fn part(&self, number: u64, name: &'static str) -> Option<ActiveSpan> {
        let begin = |span: &ActiveSpan| span.child(name, SpanKind::Internal);
        self.spans.is_exported().then(|| self.state.lock().open.get(&number).map(begin))?
    }

    /// A request is answered; with a refusal, why.
    pub fn end(&self, number: u64, refused: Option<&str>) {
        if !self.spans.is_exported() {
            return;
        }
        let span = self.state.lock().open.remove(&number);
        if let (Some(mut span), Some(why)) = (span, refused) {
            span.fail(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: TraceContext = TraceContext { trace: [1; 16], span: [2; 8], sampled: true };

    #[test]
    fn a_request_hangs_below_what_was_announced_for_its_number() {
        let spans = Arc::new(Spans::default());
        let traces = Traces::new(Arc::clone(&spans), "engine");
        traces.announce(7, PARENT);
        traces.begin(7, "bring");
        assert!(traces.context(7).is_none(), "nobody takes spans");
        spans.export_one_of(0);
        traces.announce(7, PARENT);
        traces.begin(6, "lookup");
        traces.begin(7, "bring");
        drop(traces.part(7, "ssd"));
        traces.end(6, None);
        traces.end(7, Some("gone"));
        let [ssd, bring] = &spans.take()[..] else { panic!("two spans") };
        assert_eq!((bring.name, bring.trace, bring.parent), ("bring", PARENT.trace, Some(PARENT.span)));
        assert_eq!((ssd.name, ssd.trace, ssd.parent), ("ssd", PARENT.trace, Some(bring.id)));
        assert_eq!(bring.error.as_deref(), Some("gone"));
    }

    #[test]
    fn a_client_that_only_announces_takes_no_room() {
        let spans = Arc::new(Spans::default());
        spans.export_one_of(0);
        let traces = Traces::new(Arc::clone(&spans), "engine");
        (0..1000).for_each(|number| traces.announce(number, PARENT));
        assert_eq!(traces.state.lock().announced.len(), TRACES_MAX);
    }
}
