//! What is kept of a demo as the results object: rows named `demo.<policy>.<figure>`. It knows
//! names and units only.

use forebay_results::{Results, Row};
use forebay_trace::report::Summary;

/// A count at the end of an arm, by its name.
pub type Count = (&'static str, u64);

/// Counters of every arm.
pub const CHUNKS_LOADED: &str = "chunks loaded";
pub const CHUNKS_STORED: &str = "chunks stored";
pub const PREEMPTIONS: &str = "preemptions";

/// The counter of chunks that came from an SSD; only there with an SSD or nodes.
pub const SSD_CHUNKS: &str = "chunks loaded from SSD";

/// The counter of chunks whose checksum did not fit.
pub const CORRUPTIONS_CAUGHT: &str = "corruptions caught";

/// The counter of chunks that an earlier run had left on the SSD; only there with an SSD.
pub const SSD_FOUND: &str = "chunks found on SSD";

/// The counter of chunks that came from other nodes; only there with nodes.
pub const PEER_CHUNKS: &str = "chunks loaded from peers";

/// Nodes killed on purpose, and the tokens that their engines computed a second time for it; only
/// there with `--kill-one`.
pub const NODES_KILLED: &str = "nodes killed";
pub const TOKENS_AGAIN: &str = "tokens computed again";

/// Prompt tokens that vLLM found in its own pool; only there with vLLM.
pub const POOL_TOKENS: &str = "tokens found on the GPU";

/// Chunks that could not be loaded, by why; only there with nodes.
pub const MISSES: [&str; 6] = [
    "chunks lost with their node",
    "chunks computed without a node",
    "chunks under dead leases",
    "chunks gone",
    "chunks not moved",
    CORRUPTIONS_CAUGHT,
];

/// The results object of a demo.
pub fn results(summary: &Summary) -> Results {
    let mut results = Results::new("demo");
    for arm in &summary.arms {
        let caught = arm.counters.get(CORRUPTIONS_CAUGHT).copied().unwrap_or(0);
        let figures = arm.figures().into_iter().chain([("corruptions_caught", "chunks", caught as f64)]);
        let sources = &arm.sources;
        let ssd_hit_percent = 100.0 * sources.ssd as f64 / sources.known().max(1) as f64;
        let ssd = arm.counters.contains_key(SSD_FOUND).then_some(("ssd_hit_percent", "%", ssd_hit_percent));
        let peer_hit_percent = 100.0 * sources.peer as f64 / sources.known().max(1) as f64;
        let peer =
            arm.counters.contains_key(PEER_CHUNKS).then_some(("peer_hit_percent", "%", peer_hit_percent));
        let counted = |figure, unit, name| arm.counters.get(name).map(|value| (figure, unit, *value as f64));
        let kill =
            [counted("nodes_killed", "nodes", NODES_KILLED), counted("tokens_again", "tokens", TOKENS_AGAIN)];
        for (figure, unit, value) in figures.chain(ssd).chain(peer).chain(kill.into_iter().flatten()) {
            results.rows.push(Row::of_runs(format!("demo.{}.{figure}", arm.arm), unit, &[value]));
        }
    }
    results
}
