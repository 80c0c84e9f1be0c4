//! Copies that the mover makes over a GPU's own link and the node's relays, for callers that do not
//! wait: an engine's cache loads and stores so.

use super::{Copier, CopyError};
use crate::kernels::Piece;
use crate::links::Direction;
use crate::remote::OwnCopy;
use crate::stream_copy::AWAITED_HANDOVER_BYTES_MIN;
use forebay_transfer::{Class, End, Span, SpanPair, Transfer};

/// From here on a copy goes over another process's relays, where they reach its host side. Each
/// needs a few lots of their own before it pays for what asking costs.
const RELAYED_BYTES: u64 = 16 << 20;

/// Whether a copy pays for asking the node. What is awaited has to be larger, for the GPU's own
/// kernels carry on what relays bring: see [`AWAITED_HANDOVER_BYTES_MIN`].
pub fn pays_to_relay(bytes: u64, is_awaited: bool) -> bool {
    bytes >= if is_awaited { AWAITED_HANDOVER_BYTES_MIN } else { RELAYED_BYTES }
}

impl Copier {
    /// Where the host's sides of pieces lie for the mover, if the node's relays reach them all now.
    pub fn hosts_of(&self, device: u16, direction: Direction, pieces: &[Piece]) -> Option<Vec<Span>> {
        self.relays(device)?.spans(direction, pieces)
    }

    /// Tells the node, until the value is dropped, that the GPU's own engine copies so many bytes
    /// over its link.
    pub fn own_copy(&self, device: u16, direction: Direction, bytes: u64) -> Option<OwnCopy> {
        let relays = self.relays(device).filter(|_| bytes >= self.stream_copies.rates().least_bytes())?;
        relays.own_copy(direction)
    }

    /// Bytes that came to GPUs over the node's relays, or went from them.
    pub fn relayed_bytes(&self) -> u64 {
        let telemetry = self.handle.telemetry().unwrap_or_default();
        let is_last_hop = |name: &str| name.ends_with(".d2h") != name.contains(".gpu");
        let relays = telemetry.links.iter().filter(|link| link.name.starts_with("relay-"));
        relays.filter(|link| is_last_hop(&link.name)).map(|link| link.bytes).sum()
    }

    /// Has the mover copy pieces whose host sides are `hosts`, as [`hosts_of`](Copier::hosts_of)
    /// has given them, each path taking what it can; a relay that is lost meanwhile costs the
    /// others what it had not done. Calls `on_quiet` when nothing of it is under way any more, on a
    /// thread of the mover's or of a link's: it is short, and does not wait for the mover.
    ///
    /// # Safety
    ///
    /// As for [`copy_and_wait`](Copier::copy_and_wait), until `on_quiet` is called.
    pub unsafe fn copy_relayed(
        &self,
        (device, direction): (u16, Direction),
        pieces: &[Piece],
        hosts: Vec<Span>,
        class: Class,
        on_quiet: impl FnOnce(Result<(), CopyError>) + Send + 'static,
    ) -> Result<(), CopyError> {
        let transfer = self.transfer((device, direction), pieces, hosts, class)?;
        Ok(self.quarantine.submit(&self.handle, transfer, move |end| on_quiet(moved(end)))?)
    }

    /// Copies between spans of host memory and the GPU's sides of pieces, and waits.
    pub(super) fn by_mover(
        &self,
        device: u16,
        direction: Direction,
        pieces: &[Piece],
        hosts: Vec<Span>,
    ) -> Result<(), CopyError> {
        let transfer = self.transfer((device, direction), pieces, hosts, Class::Demand)?;
        moved(self.quarantine.run(&self.handle, transfer)?)
    }

    fn transfer(
        &self,
        (device, direction): (u16, Direction),
        pieces: &[Piece],
        hosts: Vec<Span>,
        class: Class,
    ) -> Result<Transfer, CopyError> {
        let region = *self.anywhere.devices.get(&device).ok_or(CopyError::NoDevice { index: device })?;
        let pair = |(piece, host): (&Piece, Span)| {
            let (_, device, bytes) = direction.sides(piece);
            let (from, to) = direction.in_order(host, Span::new(region, device, bytes));
            SpanPair::new(from, to)
        };
        Ok(Transfer::new(pieces.iter().zip(hosts).map(pair).collect(), class))
    }
}

fn moved(end: End) -> Result<(), CopyError> {
    match end {
        End::Done { .. } => Ok(()),
        End::Failed(failure) => Err(CopyError::Failed(failure.reason)),
        End::Cancelled { .. } => Err(CopyError::Cancelled),
    }
}
