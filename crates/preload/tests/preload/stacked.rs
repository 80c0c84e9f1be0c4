//! Other interposers, before or behind, keep working: a call passes each of them once and ends.

use crate::stage::{play, preloads, stage};

const OTHERS: [&str; 5] =
    ["other-O0.so", "other-O2.so", "other-handle.so", "other-dlsym-O0.so", "other-dlsym-O2.so"];

#[test]
fn a_call_passes_each_interposer_at_most_once_in_both_orders() {
    for preload in preloads() {
        for other in OTHERS.map(|other| stage().join(other)) {
            for order in [[&*preload, &*other], [&*other, &*preload]] {
                for (program, step) in [
                    ("linked", "link"),
                    ("linked", "default"),
                    ("linked", "program"),
                    ("linked", "handle"),
                    ("program", "handle"),
                    ("program", "default"),
                    ("program", "ask:cuMemcpyHtoDAsync:3020:0"),
                ] {
                    let play = play(program, &["init", step, step]).preloading(&order);
                    let said = play
                        .with("FOREBAY_CUDA_LIBRARY", &stage().join("libforebay_cuda.so").to_string_lossy())
                        .with("DOUBLE_DECLINES", "6")
                        .says();
                    let count = |what: &str| said.out.matches(what).count();
                    let place = format!("{program} {step} {order:?}: {}", said.out);
                    assert_eq!(count("driver cuMemcpyHtoDAsync_v2 1 2 4194304 7"), 2, "{place}");
                    assert!(matches!(count("other interposer"), 0 | 2), "{place}");
                    if step == "link" {
                        assert_eq!(count("other interposer"), 2, "{place}");
                    }
                    // Those that hook dlsym go round all behind them that do: whoever does comes
                    // first.
                    let hooks = other.to_string_lossy().contains("other-dlsym");
                    let goes_round = hooks && order[0] == other && step != "link";
                    assert!(goes_round || count("offer") == 2, "{place}");
                    if hooks && matches!(step, "link" | "handle") {
                        assert_eq!(count("other interposer"), 2, "{place}");
                    }
                }
            }
        }
    }
}
