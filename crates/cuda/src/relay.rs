//! How a peer hands on what it moves for another GPU: by way of staging slots on the peer, of which
//! this names who empties or fills them. Measured figures are kept by these names.

use serde::{Deserialize, Serialize};

/// How a peer hands on what it moves for another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relay {
    /// Who moves bytes between the GPU's memory and the peer's staging.
    pub staged: By,
}

/// Who moves bytes between a GPU's memory and a peer's staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    #[default]
    Own,
    Peer,
    Kernel,
}

impl Relay {
    /// All of them, the default first.
    pub const ALL: [Relay; 3] =
        [Relay { staged: By::Own }, Relay { staged: By::Peer }, Relay { staged: By::Kernel }];
}
