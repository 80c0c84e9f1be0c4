//! How long naming a long prompt's chunks takes: median and spread over runs, without a harness.
//!
//! `cargo bench -p forebay-kv`

use std::hint::black_box;
use std::time::Instant;

use forebay_kv::{NamespaceKey, chunk_ids};

const RUNS: usize = 201;

fn main() {
    let namespace = NamespaceKey::from_bytes([7; 32]);
    let tokens: Vec<u32> = (0..100_000u32).map(|n| n.wrapping_mul(2_654_435_761) % 151_936).collect();
    for chunk_tokens in [16, 256, 1024] {
        let mut us: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                black_box(chunk_ids(&namespace, black_box(&tokens), chunk_tokens));
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        us.sort_by(f64::total_cmp);
        let [least, median, most] = [us[0], us[RUNS / 2], us[RUNS - 1]];
        println!("chunk_ids of 100,000 tokens by {chunk_tokens}: {median:.0} us ({least:.0} to {most:.0})");
    }
}
