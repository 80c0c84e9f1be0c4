//! What is kept of a demo as the results object: rows named `demo.<policy>.<figure>`. It knows names and units only.

use crate::results::{Results, Row};
use forebay_trace::report::Summary;

/// The counter of chunks whose checksum did not fit.
pub const CORRUPTIONS_CAUGHT: &str = "corruptions caught";

/// The counter of chunks that an earlier run had left on the SSD; only there with an SSD.
pub const SSD_FOUND: &str = "chunks found on SSD";

/// The results object of a demo.
pub fn results(summary: &Summary) -> Results {
    let mut results = Results::new("demo");
    for arm in &summary.arms {
        let caught = arm.counters.get(CORRUPTIONS_CAUGHT).copied().unwrap_or(0);
        let figures = arm.figures().into_iter().chain([("corruptions_caught", "chunks", caught as f64)]);
        let sources = &arm.sources;
        let ssd_hit_percent = 100.0 * sources.ssd as f64 / sources.known().max(1) as f64;
        let ssd = arm.counters.contains_key(SSD_FOUND).then_some(("ssd_hit_percent", "%", ssd_hit_percent));
        for (figure, unit, value) in figures.chain(ssd) {
            results.rows.push(Row::of_runs(format!("demo.{}.{figure}", arm.arm), unit, &[value]));
        }
    }
    results
}
