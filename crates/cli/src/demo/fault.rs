//! Faults that the demo can inject, as they are written on the command line. It knows their syntax
//! only.

use std::str::FromStr;

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// Each byte that the store's links move has one bit flipped with this probability.
    FlipBit(f64),
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let chance = text.strip_prefix("flip-bit:").and_then(|chance| chance.parse::<f64>().ok());
        let chance = chance.filter(|chance| *chance > 0.0 && *chance <= 1.0);
        chance.map(Fault::FlipBit).ok_or_else(|| {
            format!("'{text}' is no fault; allowed: flip-bit:P with P above 0 and at most 1, such as flip-bit:1e-5")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_name_and_a_probability() {
        assert_eq!("flip-bit:1e-5".parse(), Ok(Fault::FlipBit(1e-5)));
        for bad in ["flip-bit", "flip-bit:", "flip-bit:0", "flip-bit:2", "flip-bit:nan", "drop:0.1"] {
            let error = bad.parse::<Fault>().unwrap_err();
            assert!(error.contains(bad) && error.contains("flip-bit:P"), "{error}");
        }
    }
}
