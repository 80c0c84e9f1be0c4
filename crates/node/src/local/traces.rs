//! Requests of a client that are traced, from when they are taken until they are answered. This
//! file knows numbers of requests.

use crate::metrics::{Spans, Trace};
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Requests of a client that are traced at a time at most; those after are not.
const TRACES_MAX: usize = 64;

#[derive(Debug)]
pub struct Traces {
    spans: Arc<Spans>,
    client: String,
    open: Mutex<HashMap<u64, Trace>>,
}

impl Traces {
    pub fn new(spans: Arc<Spans>, client: &str) -> Traces {
        Traces { spans, client: client.to_owned(), open: Mutex::default() }
    }

    /// A request that will be answered is taken.
    pub fn begin(&self, number: u64, name: &'static str) {
        let Some(mut trace) = Trace::begin(&self.spans, name) else { return };
        trace.note("client", &self.client);
        let mut open = self.open.lock();
        if open.len() < TRACES_MAX {
            open.insert(number, trace);
        }
    }

    /// A request is answered; with a refusal, why.
    pub fn end(&self, number: u64, refused: Option<&str>) {
        if !self.spans.samples() {
            return;
        }
        let trace = self.open.lock().remove(&number);
        if let (Some(mut trace), Some(why)) = (trace, refused) {
            trace.fail(why);
        }
    }
}
