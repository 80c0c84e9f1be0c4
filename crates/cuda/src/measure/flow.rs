//! A flow: lots that follow each other over one link without a gap.

use super::MeasureError;
use crate::device::{Event, Stream};
use crate::driver::CudaError;
use crate::driver::abi::Address;
use crate::kernels::Piece;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Lots in the stream at a time: one moves, one waits behind it, one covers for the thread that
/// puts them in.
const LOTS_IN_FLIGHT: usize = 3;
/// A rate is that of this many lots at least.
const LOTS_MIN: u64 = 4;
/// A link that takes so long for that is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// One side of a flow: lots lie one behind another, over and over again.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    pub start: Address,
    pub lots: u64,
}

/// A stream and the lots in it.
#[derive(Debug)]
pub struct Flow {
    pub link: String,
    stream: Stream,
    from: Ring,
    to: Ring,
    lot_bytes: u64,
    posted: u64,
    idle: Vec<Event>,
    /// Of the lots that are in the stream.
    ends: VecDeque<Event>,
    /// When a lot was first seen to have ended, and how many have since then.
    first: Option<Instant>,
    since: u64,
    last: Instant,
}

impl Flow {
    pub fn new(
        link: String,
        stream: Stream,
        from: Ring,
        to: Ring,
        lot_bytes: u64,
    ) -> Result<Flow, CudaError> {
        let idle = (0..LOTS_IN_FLIGHT).map(|_| Event::new(stream.device())).collect::<Result<_, _>>()?;
        let (ends, last) = (VecDeque::with_capacity(LOTS_IN_FLIGHT), Instant::now());
        Ok(Flow { link, stream, from, to, lot_bytes, posted: 0, idle, ends, first: None, since: 0, last })
    }

    fn begin(&mut self) {
        (self.first, self.since) = (None, 0);
    }

    /// Notes lots that have ended, and puts others in.
    ///
    /// # Safety
    ///
    /// Both rings are memory that the stream's device reaches, and nobody else uses what is there.
    unsafe fn turn(&mut self) -> Result<(), CudaError> {
        let mut ended = 0;
        while let Some(end) = self.ends.front()
            && end.is_passed()?
        {
            self.idle.extend(self.ends.pop_front());
            ended += 1;
        }
        if ended > 0 {
            self.last = Instant::now();
            match self.first {
                Some(_) => self.since += ended,
                None => self.first = Some(self.last),
            }
        }
        while let Some(end) = self.idle.pop() {
            let Piece { from, to, bytes } = self.next();
            // SAFETY: by this function's contract.
            unsafe { self.stream.copy(from, to, bytes)? };
            end.record(&self.stream)?;
            self.ends.push_back(end);
        }
        Ok(())
    }

    fn next(&mut self) -> Piece {
        let at = |ring: &Ring| ring.start + self.posted % ring.lots * self.lot_bytes;
        let piece = Piece { from: at(&self.from), to: at(&self.to), bytes: self.lot_bytes };
        self.posted += 1;
        piece
    }

    fn drain(&mut self) -> Result<(), CudaError> {
        self.idle.extend(self.ends.drain(..));
        self.stream.synchronize()
    }

    /// Bytes per second between the first and the last lot that was seen to end.
    fn bytes_per_s(&self) -> f64 {
        let seconds = self.first.map_or(0.0, |first| (self.last - first).as_secs_f64());
        (self.since * self.lot_bytes) as f64 / seconds
    }
}

/// What flows carry together, in bytes per second, while all of them are busy.
///
/// # Safety
///
/// All rings are memory that the flows' devices reach, and nobody else uses what is there until
/// this returns. A context is current.
pub unsafe fn run(flows: &mut [Flow], window: Duration) -> Result<f64, MeasureError> {
    flows.iter_mut().for_each(Flow::begin);
    // SAFETY: by this function's contract.
    let ran = unsafe { fill(flows, window) };
    let drained = flows.iter_mut().map(Flow::drain).fold(Ok(()), Result::and);
    ran?;
    drained?;
    Ok(flows.iter().map(Flow::bytes_per_s).sum())
}

/// # Safety
///
/// As for [`run`].
unsafe fn fill(flows: &mut [Flow], window: Duration) -> Result<(), MeasureError> {
    let start = Instant::now();
    loop {
        for flow in &mut *flows {
            // SAFETY: by this function's contract.
            unsafe { flow.turn()? };
        }
        let slow = flows.iter().find(|flow| flow.since < LOTS_MIN);
        match slow {
            None if start.elapsed() >= window => return Ok(()),
            Some(flow) if start.elapsed() >= STUCK_AFTER => {
                let (link, lot_bytes) = (flow.link.clone(), flow.lot_bytes);
                return Err(MeasureError::Stuck { link, lots: LOTS_MIN, lot_bytes, limit: STUCK_AFTER });
            }
            _ => std::hint::spin_loop(),
        }
    }
}
