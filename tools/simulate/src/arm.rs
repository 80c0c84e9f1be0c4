//! What is compared: the router's policies, and what others do with a prompt or a session.

use forebay_router::policy::{Policy, UnknownPolicy};
use forebay_router::transfers::TransferKind;
use std::fmt;
use std::str::FromStr;

/// A way to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// One of the router's policies; nothing is transferred.
    Policy(Policy),
    /// Elastic prefill by cost, `forebay_router::elastic`: with pulls and hand-overs, or only one
    /// of them.
    Elastic(TransferKinds),
    /// The rule of the agentic-kv report: a prompt with more than 20,000 new tokens is prefilled at
    /// the engine with the least pending work, at most four at a time; all else is `lpwl`.
    Threshold,
    /// `session-sticky`, but after so many turns a session moves to the least loaded engine, and
    /// its KV with it.
    Migrate(u32),
}

/// The transfers that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKinds {
    Both,
    Pulls,
    HandOvers,
}

impl TransferKinds {
    const ALL: [TransferKinds; 3] = [TransferKinds::Both, TransferKinds::Pulls, TransferKinds::HandOvers];

    pub fn kinds(self) -> &'static [TransferKind] {
        match self {
            TransferKinds::Both => &[TransferKind::Pull, TransferKind::HandOver],
            TransferKinds::Pulls => &[TransferKind::Pull],
            TransferKinds::HandOvers => &[TransferKind::HandOver],
        }
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arm::Policy(policy) => policy.fmt(out),
            Arm::Elastic(TransferKinds::Both) => out.write_str("elastic"),
            Arm::Elastic(TransferKinds::Pulls) => out.write_str("elastic-pulls"),
            Arm::Elastic(TransferKinds::HandOvers) => out.write_str("elastic-hand-overs"),
            Arm::Threshold => out.write_str("threshold"),
            Arm::Migrate(turns) => write!(out, "migrate-{turns}"),
        }
    }
}

/// The text names no arm.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; nor elastic, elastic-pulls, elastic-hand-overs, threshold or migrate-TURNS")]
pub struct UnknownArm(UnknownPolicy);

impl FromStr for Arm {
    type Err = UnknownArm;

    fn from_str(text: &str) -> Result<Arm, UnknownArm> {
        let turns = text.strip_prefix("migrate-").and_then(|turns| turns.parse().ok());
        let elastic = TransferKinds::ALL.map(Arm::Elastic).into_iter().find(|arm| arm.to_string() == text);
        match (elastic, text, turns) {
            (Some(arm), ..) => Ok(arm),
            (_, "threshold", _) => Ok(Arm::Threshold),
            (_, _, Some(turns @ 1..)) => Ok(Arm::Migrate(turns)),
            _ => text.parse().map(Arm::Policy).map_err(UnknownArm),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arm_is_read_as_it_is_written() {
        let policies = Policy::ALL.map(Arm::Policy);
        let others = [Arm::Threshold, Arm::Migrate(5)];
        for arm in policies.into_iter().chain(others).chain(TransferKinds::ALL.map(Arm::Elastic)) {
            assert_eq!(arm.to_string().parse(), Ok(arm));
        }
        for wrong in ["", "migrate-0", "migrate-", "elastics"] {
            assert!(wrong.parse::<Arm>().unwrap_err().to_string().contains(&format!("'{wrong}'")));
        }
    }
}
