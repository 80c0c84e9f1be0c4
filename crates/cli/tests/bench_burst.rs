//! `forebay bench burst`: a burst of one prompt goes to all engines under `added-latency`, and the
//! rows are there. `lpwl` beside it shows that the benchmark would see a queue.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::Command;

#[test]
fn a_burst_of_one_prompt_does_not_queue_behind_its_owner_while_engines_idle() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("burst.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["bench", "burst", "--runs", "1", "--policies", "lpwl,added-latency", "--json"]).arg(&file);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let value = |figure: &str, policy: &str| {
        let name = format!("route.burst120.{figure}.{policy}");
        let rows = results["rows"].as_array().unwrap();
        rows.iter().find(|row| row["name"] == *name).unwrap()["value"].as_f64().unwrap()
    };
    assert!(value("idle_while_queued", "lpwl") > 0.5, "{results}");
    assert_eq!(value("idle_while_queued", "added-latency"), 0.0, "{results}");
    assert!(value("ttft_p90_s", "added-latency") < value("ttft_p90_s", "lpwl") / 3.0, "{results}");
}
