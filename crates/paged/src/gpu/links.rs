//! Over which links a GPU's copies go: those of the GPUs that this process sees, by copy streams.
//! A process that sees one GPU may have the node relay as well; then large copies are a mover's,
//! whose paths are that GPU's own link and the node's relays. This file knows which it is, and why.

use super::failed;
use crate::copies::{Direction, NotCopied, Relayed};
use forebay_cuda::device::Device;
use forebay_cuda::driver::Driver;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links;
use forebay_cuda::remote::{NodeRelays, OwnCopy, RELAYS_VARIABLE, RelaysAt, Status};
use forebay_cuda::stream_copy::StreamCopies;
use forebay_cuda::{Copier, CopierOptions, pays_to_relay};
use forebay_transfer::Span;

#[derive(Debug)]
pub enum Links {
    Visible(Box<StreamCopies>),
    WithNode(Box<Copier>),
}

impl Links {
    /// Those of all visible GPUs but for a GPU's siblings; of the node's, if this is the only GPU
    /// that there is to see and no sibling copies at the same time.
    pub fn open(
        driver: &'static Driver,
        device: u16,
        siblings: &[u16],
        relays: &NodeRelays,
    ) -> Result<Links, NotCopied> {
        let count = Device::count(driver).map_err(failed)?;
        let has_siblings = siblings.iter().any(|sibling| *sibling != device);
        if let Some(at) = node_relays(relays, count, has_siblings) {
            let (devices, relays) = (Some(vec![device]), NodeRelays::At(at));
            let options = CopierOptions { devices, relays, ..CopierOptions::default() };
            let copier = Copier::with_driver(driver, &options).map_err(failed)?;
            return Ok(Links::WithNode(Box::new(copier)));
        }
        let devices: Vec<u16> =
            (0..count).filter(|other| *other == device || !siblings.contains(other)).collect();
        let stream_copies = forebay_cuda::start_stream_copies(driver, Some(&devices)).map_err(failed)?;
        Ok(Links::Visible(Box::new(stream_copies)))
    }

    pub fn stream_copies(&self) -> &StreamCopies {
        match self {
            Links::Visible(stream_copies) => stream_copies,
            Links::WithNode(copier) => copier.stream_copies(),
        }
    }

    /// What copies over the node's relays too, if there are to be any.
    pub fn with_node(&self) -> Option<&Copier> {
        match self {
            Links::Visible(_) => None,
            Links::WithNode(copier) => Some(copier),
        }
    }

    /// Of a batch that is large enough for the node's relays, if these reach it all now: where the
    /// arena's sides of each list lie for the mover.
    pub fn hosts_of(
        &self,
        device: u16,
        (direction, is_awaited): (Direction, bool),
        bytes: u64,
        lists: &[Vec<Piece>],
    ) -> Option<Vec<Vec<Span>>> {
        // A node that hangs may still write what it was asked to store: no page and no slot could
        // be given back until it is over.
        let may_relay = direction == Direction::Load && pays_to_relay(bytes, is_awaited);
        let copier = self.with_node().filter(|_| may_relay)?;
        lists.iter().map(|list| copier.hosts_of(device, way(direction), list)).collect()
    }

    /// Tells the node, while it lives, that this GPU's link is its engine's.
    pub fn own_copy(&self, device: u16, direction: Direction, bytes: u64) -> Option<OwnCopy> {
        self.with_node()?.own_copy(device, way(direction), bytes)
    }

    /// What the node's relays do for a GPU.
    pub fn relayed(&self, device: u16) -> Relayed {
        let Some(copier) = self.with_node() else { return Relayed::default() };
        let Some(attachment) = copier.relays(device) else { return Relayed::default() };
        let relays = match attachment.status() {
            Status::Attached { relays } if attachment.shared_bytes() > 0 => relays as u64,
            _ => 0,
        };
        Relayed { relays, lost: attachment.losses(), bytes: copier.relayed_bytes() }
    }
}

pub fn way(direction: Direction) -> links::Direction {
    match direction {
        Direction::Load => links::Direction::HostToDevice,
        Direction::Store => links::Direction::DeviceToHost,
    }
}

/// Which node's relays are used. Where one is named and cannot be used, the log says why.
fn node_relays(relays: &NodeRelays, visible: u16, has_siblings: bool) -> Option<RelaysAt> {
    let named = match relays {
        NodeRelays::None => Ok(None),
        NodeRelays::At(at) => Ok(Some(at.clone())),
        NodeRelays::FromEnvironment => RelaysAt::from_environment(),
    };
    let unused = match named {
        Ok(None) => return None,
        Ok(Some(at)) if visible == 1 && !has_siblings => return Some(at),
        Ok(Some(_)) if visible > 1 => format!("this process sees {visible} GPUs, whose links it uses itself"),
        Ok(Some(_)) => "the engine's other ranks copy at the same time over their own links".into(),
        Err(error) => format!("{RELAYS_VARIABLE}: the token: {error}"),
    };
    tracing::info!(reason = unused, "the node's relays carry no KV");
    None
}
