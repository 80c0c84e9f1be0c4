//! What KV events of engines make of the books: they lower what an engine is believed to hold.

use super::Dispatcher;
use crate::chain::CHUNK_BYTES;
use crate::rank_events::{Dropped, Report};
use crate::reported_cache::Noted;

impl Dispatcher {
    /// One of a backend's ranks reports what its KV events say of its cache. That only lowers what
    /// is believed to be there: answers say what is.
    pub fn noted_events(
        &mut self,
        now_us: u64,
        slot: usize,
        rank: usize,
        ranks: usize,
        report: &Report,
    ) -> Noted {
        let backend = &mut self.backends[slot];
        let noted = backend.cache.note(now_us, rank, ranks, report);
        let held = backend.cache.held();
        let totals = &mut backend.totals;
        totals.kv_events.add(&report.counts);
        (totals.kv_events_followed, totals.kv_live_blocks) =
            (held.is_some(), held.map_or(0, |held| held.blocks));
        if noted.is_doubted {
            totals.kv_events.dropped[Dropped::Contradicted as usize] += report.counts.batches;
        } else if report.emptied {
            self.index.forget(slot);
        }
        match held {
            Some(held) => {
                let bytes_per_token = self.bytes_per_token.average();
                let chunks = |tokens: u64| (tokens as f64 * bytes_per_token) as usize / CHUNK_BYTES;
                let room = held.room_tokens.map(chunks);
                let came = backend.stored_chunks(report.stored_tokens, bytes_per_token);
                self.index.told(slot, came, chunks(held.tokens), room);
            }
            None => self.index.untold(slot),
        }
        noted
    }
}
