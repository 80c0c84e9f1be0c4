//! What carries the bytes of a flow. This file names it; it must never know how it works.

use crate::ucx::{Fabric, RailReport};
use std::fmt;

/// What carries the bytes of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// A socket.
    Tcp,
    /// A rail of UCX, of this fabric.
    Rail(Fabric),
}

impl Path {
    /// A short name, for counters.
    pub fn name(self) -> &'static str {
        match self {
            Path::Tcp => "tcp",
            Path::Rail(Fabric::Memory) => "ucx_memory",
            Path::Rail(Fabric::Rdma) => "ucx_rdma",
            Path::Rail(Fabric::Tcp) => "ucx_tcp",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The way that one flow takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    Tcp,
    /// A rail, by its number among those of this agent.
    Rail {
        nth: usize,
        fabric: Fabric,
        report: Option<RailReport>,
    },
}

impl Way {
    pub fn path(&self) -> Path {
        match self {
            Way::Tcp => Path::Tcp,
            Way::Rail { fabric, .. } => Path::Rail(*fabric),
        }
    }

    /// The number of its rail.
    pub fn rail(&self) -> Option<usize> {
        match self {
            Way::Tcp => None,
            Way::Rail { nth, .. } => Some(*nth),
        }
    }
}
