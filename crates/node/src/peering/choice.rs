//! Which peer to pull from: the one that would be through first, by what it moved lately and by
//! what waits for it. A pure function.

/// What a peer whose rate nobody knows is expected to move in a microsecond: it is tried, and then
/// it is known.
const EXPECTED_BYTES_PER_US: f64 = 500.0;
/// Bytes below which a measured rate says more about latency than about the peer.
const MEASURED_BYTES_MIN: u64 = 1 << 20;

/// A peer that is said to have what is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// Whether there is a connection.
    pub is_up: bool,
    /// Bytes that it moved so far.
    pub moved_bytes: u64,
    /// How long that took.
    pub busy_us: u64,
    /// Bytes that are under way.
    pub queued_bytes: u64,
}

/// The candidates, the best one first. Those that are up go before those that are not.
pub fn rank(mut candidates: Vec<Candidate>, wanted_bytes: u64) -> Vec<String> {
    let through_us = |candidate: &Candidate| {
        let measured = candidate.moved_bytes as f64 / candidate.busy_us.max(1) as f64;
        let known = candidate.moved_bytes >= MEASURED_BYTES_MIN;
        let rate = if known { measured.max(1e-3) } else { EXPECTED_BYTES_PER_US };
        (candidate.queued_bytes + wanted_bytes) as f64 / rate
    };
    candidates.sort_by(|one, other| {
        let up = other.is_up.cmp(&one.is_up);
        up.then(through_us(one).total_cmp(&through_us(other))).then_with(|| one.name.cmp(&other.name))
    });
    candidates.into_iter().map(|candidate| candidate.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, is_up: bool, moved_bytes: u64, busy_us: u64, queued_bytes: u64) -> Candidate {
        Candidate { name: name.into(), is_up, moved_bytes, busy_us, queued_bytes }
    }

    #[test]
    fn the_peer_that_would_be_through_first_is_asked_first() {
        const GB: u64 = 1_000_000_000;
        for (first, second, why) in [
            (peer("b", true, GB, 1_000_000, 0), peer("a", true, GB, 2_000_000, 0), "the faster one"),
            (peer("b", true, GB, 2_000_000, 0), peer("a", true, GB, 1_000_000, GB), "the less busy one"),
            (peer("b", true, GB, 9_000_000, GB), peer("a", false, GB, 1, 0), "the one that is there"),
            (
                peer("b", true, 0, 0, 0),
                peer("a", true, GB, 100_000_000, 0),
                "an unknown one before a slow one",
            ),
            (peer("a", true, 0, 0, 0), peer("b", true, 0, 0, 0), "otherwise by name"),
        ] {
            let best = first.name.clone();
            assert_eq!(rank(vec![second.clone(), first.clone()], 1 << 20)[0], best, "{why}");
            assert_eq!(rank(vec![first, second], 1 << 20)[0], best, "{why}");
        }
    }
}
