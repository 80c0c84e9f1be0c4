//! Makes arrivals count from the earliest one, for formats whose times are dates or count from
//! elsewhere. Rows may stand out of order; how far is limited, because a trace may be longer than
//! memory.

use super::error::TraceError;
use super::lines::Requests;
use crate::request::TraceRequest;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

/// Among how many rows at the beginning the earliest is looked for.
pub(super) const WINDOW_ROWS: usize = 1 << 16;

pub(super) struct Rebased {
    inner: Requests,
    file: Arc<Path>,
    window_rows: usize,
    window: VecDeque<Result<TraceRequest, TraceError>>,
    start_us: Option<u64>,
    filled: bool,
}

impl Rebased {
    pub(super) fn new(inner: Requests, file: Arc<Path>) -> Rebased {
        let window = VecDeque::new();
        Rebased { inner, file, window_rows: WINDOW_ROWS, window, start_us: None, filled: false }
    }

    fn fill(&mut self) {
        self.filled = true;
        while self.window.len() < self.window_rows
            && let Some(row) = self.inner.next()
        {
            let readable = matches!(row, Ok(_) | Err(TraceError::Line(_)));
            self.window.push_back(row);
            if !readable {
                break;
            }
        }
        self.start_us = self.window.iter().flatten().map(|request| request.arrival_us).min();
    }
}

impl Iterator for Rebased {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.filled {
            self.fill();
        }
        let mut request = match self.window.pop_front().or_else(|| self.inner.next())? {
            Ok(request) => request,
            error => return Some(error),
        };
        let start_us = *self.start_us.get_or_insert(request.arrival_us);
        Some(match request.arrival_us.checked_sub(start_us) {
            Some(arrival_us) => {
                request.arrival_us = arrival_us;
                Ok(request)
            }
            None => Err(TraceError::FarOutOfOrder {
                file: self.file.to_path_buf(),
                row: request.session,
                window_rows: self.window_rows,
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Path, Rebased, Requests, TraceError, TraceRequest};
    use std::sync::Arc;

    fn rebased(times_us: &[u64], window_rows: usize) -> Vec<Result<u64, String>> {
        let request = |&arrival_us: &u64| TraceRequest { arrival_us, ..TraceRequest::default() };
        let rows: Vec<Result<_, TraceError>> = times_us.iter().map(request).map(Ok).collect();
        let inner: Requests = Box::new(rows.into_iter());
        let rebased = Rebased { window_rows, ..Rebased::new(inner, Arc::from(Path::new("t.csv"))) };
        let shown = |row: Result<TraceRequest, TraceError>| {
            row.map(|request| request.arrival_us).map_err(|error| error.to_string())
        };
        rebased.map(shown).collect()
    }

    #[test]
    fn rows_out_of_order_are_kept_and_count_from_the_earliest() {
        assert_eq!(rebased(&[700, 500, 900, 501], 10), [Ok(200), Ok(0), Ok(400), Ok(1)]);
        assert_eq!(rebased(&[700, 500, 900, 501], 2), [Ok(200), Ok(0), Ok(400), Ok(1)]);
        assert_eq!(rebased(&[], 2), []);
    }

    #[test]
    fn a_row_that_is_too_far_out_of_order_ends_the_reading_with_advice() {
        let rows = rebased(&[700, 800, 500], 2);
        assert_eq!(rows[..2], [Ok(0), Ok(100)]);
        assert!(rows[2].as_ref().unwrap_err().contains("sort"), "{rows:?}");
    }
}
