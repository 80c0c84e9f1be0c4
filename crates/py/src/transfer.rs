//! A transfer as Python has it: posted, watched, waited for, posted again. This file knows when it
//! was posted and when it ended; how it is carried out is the agent's.

use crate::errors::{of_agent, of_end};
use crate::process::Own;
use forebay_net::{End, Request, State};
use forebay_transfer::lock::{Condvar, Mutex};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A list of memory, checked and ready for transfers.
#[pyclass(frozen, module = "forebay")]
pub struct Prepared(pub Own<forebay_net::Prepared>);

#[pymethods]
impl Prepared {
    /// The peer whose memory it is; None: this end's.
    #[getter]
    fn peer(&self) -> PyResult<Option<&str>> {
        Ok(self.0.get()?.peer())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.len() as usize)
    }
}

/// A transfer that can be posted, any number of times.
#[pyclass(frozen, module = "forebay")]
pub struct Transfer(Own<Moving>);

struct Moving {
    request: Request,
    blocks: u64,
    latest: Arc<Latest>,
}

/// The latest post.
#[derive(Default)]
struct Latest {
    post: Mutex<Post>,
    ended: Condvar,
}

#[derive(Default)]
struct Post {
    moving: bool,
    at: Option<(SystemTime, Instant)>,
    /// How long the call took that posted it.
    call: Duration,
    took: Option<Duration>,
}

impl Latest {
    fn end(&self) {
        let mut post = self.post.lock();
        post.moving = false;
        post.took = post.at.map(|(_, began)| began.elapsed());
        drop(post);
        self.ended.notify_all();
    }

    /// Waits for the end; says whether it has come.
    fn wait(&self, limit: Option<Duration>) -> bool {
        let over = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut post = self.post.lock();
        while post.moving {
            let left = over.map(|over| over.saturating_duration_since(Instant::now()));
            match left {
                None => self.ended.wait(&mut post),
                Some(left) if left.is_zero() => return false,
                Some(left) => drop(self.ended.wait_for(&mut post, left)),
            }
        }
        true
    }
}

impl Transfer {
    pub fn new(request: Request, blocks: u64) -> Transfer {
        Transfer(Own::new(Moving { request, blocks, latest: Arc::default() }))
    }
}

impl Moving {
    fn state(&self) -> &'static str {
        if self.latest.post.lock().moving {
            return "moving";
        }
        match self.end() {
            Some(End::Done { .. }) => "done",
            Some(_) => "failed",
            None => "ready",
        }
    }

    /// When the latest post was made, how long the call took, and how long until its end.
    fn times(&self) -> Option<(u64, u64, u64)> {
        let post = self.latest.post.lock();
        let (wall, _) = post.at?;
        let since_1970 = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // A transfer can end before the call that posted it returns.
        let took = post.took.filter(|_| !post.moving)?;
        Some((in_ns(since_1970), in_ns(post.call.min(took)), in_ns(took)))
    }

    /// The end of the latest post.
    fn end(&self) -> Option<End> {
        if self.latest.post.lock().moving {
            return None;
        }
        match self.request.state() {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    fn begin(&self, notification: Option<Vec<u8>>) -> Result<(), forebay_net::AgentError> {
        let mut post = self.latest.post.lock();
        if post.moving {
            return Err(forebay_net::AgentError::UnderWay);
        }
        let began = Instant::now();
        *post = Post { moving: true, at: Some((SystemTime::now(), began)), ..Post::default() };
        drop(post);
        let latest = Arc::clone(&self.latest);
        let on_end = move |_| latest.end();
        let posted = match notification {
            Some(text) => self.request.post_with(text, on_end),
            None => self.request.post(on_end),
        };
        let mut post = self.latest.post.lock();
        post.call = began.elapsed();
        if posted.is_err() {
            post.moving = false;
            // Another thread may have begun to wait.
            self.latest.ended.notify_all();
        }
        posted
    }
}

#[pymethods]
impl Transfer {
    /// "ready", "moving", "done" or "failed".
    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        Ok(self.0.get()?.state())
    }

    /// Why the latest post failed, if it did.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let error = self.0.get()?.end().as_ref().and_then(of_end);
        Ok(error.map(|error| error.into_value(py).into_bound(py).into_any()))
    }

    /// Bytes that it moves.
    #[getter]
    fn total_bytes(&self) -> PyResult<u64> {
        Ok(self.0.get()?.request.bytes())
    }

    /// Blocks that it moves.
    #[getter]
    fn blocks(&self) -> PyResult<u64> {
        Ok(self.0.get()?.blocks)
    }

    /// When the latest post was made, in ns since 1970; how long the call took, in ns; how long
    /// until its end, in ns. None before its end.
    #[getter]
    fn times(&self) -> PyResult<Option<(u64, u64, u64)>> {
        Ok(self.0.get()?.times())
    }

    /// Begins. A notification given here takes the place of the transfer's own, for this time.
    #[pyo3(signature = (notification = None))]
    fn post(&self, py: Python<'_>, notification: Option<Vec<u8>>) -> PyResult<()> {
        let moving = self.0.get()?;
        py.detach(|| moving.begin(notification)).map_err(of_agent)
    }

    /// Waits for the end and raises what went wrong. False: it has not come in time.
    #[pyo3(signature = (timeout_s = None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let moving = self.0.get()?;
        // What is too long for a clock is as good as for ever.
        let limit =
            timeout_s.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        if !py.detach(|| moving.latest.wait(limit)) {
            return Ok(false);
        }
        match moving.end().as_ref().and_then(of_end) {
            Some(error) => Err(error),
            None => Ok(true),
        }
    }

    /// Ends it early, if it is under way. When this returns, nothing touches the memory any more,
    /// at both ends.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let moving = self.0.get()?;
        py.detach(|| {
            moving.request.cancel();
            moving.latest.wait(None);
        });
        Ok(())
    }
}

fn in_ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
