//! The fabrics that UCX knows, each a transport of its own. UCX itself calls transports what
//! carries bytes on a fabric: `rc_mlx5`, `sysv`.

/// What connects two ends. A rail has one, since each tells in its own way that a peer has died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fabric {
    /// Memory that processes of one host share.
    Memory,
    /// InfiniBand and RoCE.
    Rdma,
    /// Sockets. Whoever can reach UCX's port can have it write anywhere in this process
    /// (`docs/decisions/004-ucx-link.md`), so only on devices that nobody else is on.
    Tcp,
}

impl Fabric {
    /// As ends name it to each other.
    pub fn code(self) -> u32 {
        match self {
            Fabric::Memory => 1,
            Fabric::Rdma => 2,
            Fabric::Tcp => 3,
        }
    }

    /// As UCX's setting `TLS` names its transports.
    pub(super) fn transports(self) -> &'static str {
        match self {
            Fabric::Memory => "sm",
            Fabric::Rdma => "ib",
            Fabric::Tcp => "tcp",
        }
    }

    /// The fabric of a transport; `None` for those that no rail uses.
    pub(super) fn of(transport: &str) -> Option<Fabric> {
        match transport {
            "posix" | "sysv" | "cma" | "knem" | "xpmem" => Some(Fabric::Memory),
            "tcp" => Some(Fabric::Tcp),
            _ if ["rc", "dc", "ud"].iter().any(|verbs| transport.starts_with(verbs)) => Some(Fabric::Rdma),
            _ => None,
        }
    }
}
