//! The orders in which engines lay out the axes of a KV cache.
//!
//! Knows vLLM's six physical orders by name.

use std::fmt;
use std::str::FromStr;

/// A physical order of the axes L, B, H, N (and the cell C innermost), outermost first, by vLLM's
/// names.
///
/// With L outermost each layer is a tensor of its own; otherwise all layers share one tensor
/// (cross-layer blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AxisOrder {
    /// Per layer, heads before tokens: vLLM's `HND`.
    Lbhnc,
    /// Per layer, tokens before heads: vLLM's `NHD`.
    Lbnhc,
    /// Per layer, heads before blocks.
    Lhbnc,
    /// Cross-layer, heads before tokens: a block of all layers is one extent.
    Blhnc,
    /// Cross-layer, tokens before heads: a block of all layers is one extent.
    Blnhc,
    /// Cross-layer, heads before layers: one head of a block in all layers is one extent.
    Bhlnc,
}

impl AxisOrder {
    pub const ALL: [AxisOrder; 6] =
        [Self::Lbhnc, Self::Lbnhc, Self::Lhbnc, Self::Blhnc, Self::Blnhc, Self::Bhlnc];

    /// vLLM's name of the order.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lbhnc => "LBHNC",
            Self::Lbnhc => "LBNHC",
            Self::Lhbnc => "LHBNC",
            Self::Blhnc => "BLHNC",
            Self::Blnhc => "BLNHC",
            Self::Bhlnc => "BHLNC",
        }
    }

    /// Whether a page holds head after head, rather than token after token.
    pub const fn heads_before_tokens(self) -> bool {
        !matches!(self, Self::Lbnhc | Self::Blnhc)
    }
}

impl fmt::Display for AxisOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An order that vLLM does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("layout is {0:?}; allowed: HND, NHD, LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC")]
pub struct UnknownOrder(pub String);

impl FromStr for AxisOrder {
    type Err = UnknownOrder;

    /// Reads a name in either of vLLM's spellings: the axes (`LBHNC`) or the older `HND` and `NHD`.
    fn from_str(name: &str) -> Result<Self, UnknownOrder> {
        match name {
            "HND" => Ok(Self::Lbhnc),
            "NHD" => Ok(Self::Lbnhc),
            _ => Self::ALL
                .into_iter()
                .find(|order| order.name() == name)
                .ok_or_else(|| UnknownOrder(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_says_whether_heads_come_before_tokens() {
        for order in AxisOrder::ALL {
            let name = order.name();
            assert_eq!(order.heads_before_tokens(), name.find('H') < name.find('N'));
            assert_eq!(order.name().parse(), Ok(order));
        }
    }

    #[test]
    fn the_older_names_mean_the_per_layer_orders() {
        assert_eq!("HND".parse(), Ok(AxisOrder::Lbhnc));
        assert_eq!("NHD".parse(), Ok(AxisOrder::Lbnhc));
        assert!("hnd".parse::<AxisOrder>().is_err());
    }
}
