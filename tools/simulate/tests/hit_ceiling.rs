//! How far the router's estimate of different chunks is from their number in a public trace. The
//! trace is no part of the project: the test looks for it in `FOREBAY_TRACES` or beside the
//! workspace and says so when it skips.

use forebay_router::distinct_chunks::DistinctChunks;
use forebay_trace::format::{ReadOptions, TraceReader};
use forebay_trace::prefix::prefix_keys;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

#[test]
fn the_ceiling_of_the_hit_rate_is_within_one_percent_on_the_weka_trace() {
    const NAME: &str = "weka-claude-code";
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let path = std::env::var_os("FOREBAY_TRACES").map_or(beside, PathBuf::from).join(NAME);
    if !path.exists() {
        let why = format_args!("no trace {NAME}; set FOREBAY_TRACES to the directory that has it");
        return testkit::skipped(why);
    }
    let (mut exact, mut estimated) = (HashSet::new(), DistinctChunks::default());
    for request in TraceReader::open(&path, ReadOptions::default()).unwrap() {
        let keys: Vec<u64> = prefix_keys(&request.unwrap()).collect();
        estimated.note(&keys);
        exact.extend(keys);
    }
    let (exact, about, all) = (exact.len() as f64, estimated.distinct() as f64, estimated.noted() as f64);
    assert!(all > 1e5, "a trace of {all} blocks shows nothing");
    let (distinct_off, ceiling_off) = ((about - exact).abs() / exact, (about - exact).abs() / (all - exact));
    println!("{all} blocks, {exact} different, {about} estimated: {distinct_off}, ceiling {ceiling_off}");
    assert!(distinct_off < 0.01 && ceiling_off < 0.01, "{exact} are estimated as {about} of {all}");
}
