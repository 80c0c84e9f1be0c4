//! `forebay bench copy` on the fake driver: every row is there, and a wrong byte anywhere is an
//! error.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::HashMap;
use std::process::{Command, Output};

/// Enough of everything, and little of it.
const SMALL: [&str; 10] =
    ["bench", "copy", "--runs", "1", "--sizes", "64kib,16mib", "--pages", "64kib", "--pages-total", "1mib"];

fn bench(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command
        .args(args)
        .env("FAKE_CUDA_GPUS", "2")
        .env("FOREBAY_LIBCUDA", &fake_cuda_install::installed().libcuda);
    command.envs(env.iter().copied()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into()
}

/// Rows by name.
fn rows(file: &std::path::Path) -> HashMap<String, Value> {
    let results: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(results["bench"], "copy");
    assert!(!results["machine"]["gpus"].as_array().unwrap().is_empty());
    let rows = results["rows"].as_array().unwrap().clone();
    let count = rows.len();
    let rows: HashMap<_, _> =
        rows.into_iter().map(|row| (row["name"].as_str().unwrap().to_owned(), row)).collect();
    assert_eq!(rows.len(), count, "two rows have the same name");
    rows
}

#[test]
fn every_row_is_there_with_its_ceiling_and_its_peer() {
    let folder = tempfile::tempdir().unwrap();
    let (json, plot) = (folder.path().join("copy.json"), folder.path().join("copy.svg"));
    let mut args = SMALL.to_vec();
    args.extend(["--paths", "best,chain,mover", "--json", json.to_str().unwrap()]);
    args.extend(["--plot", plot.to_str().unwrap(), "--daemon"]);
    let ran = bench(&args, &[]);
    assert!(ran.status.success(), "{}", said(&ran));
    let rows = rows(&json);
    let mut measured = Vec::new();
    for course in ["h2d", "d2h"] {
        measured.extend([format!("copy.{course}.1gpu.64kib"), format!("copy.{course}.paged.64kib")]);
    }
    for course in ["h2d", "d2h", "both"] {
        measured.extend(["1gpu", "allgpus"].map(|group| format!("copy.{course}.{group}.16mib")));
    }
    for course in ["h2d", "d2h"] {
        let row = &rows[&format!("copy.{course}.daemon.16mib")];
        assert!(row["value"].as_f64().unwrap() > 0.0 && row["peer"]["value"].as_f64().unwrap() > 0.0);
    }
    let ways = ["", ".chain", ".mover"];
    for name in measured.iter().flat_map(|name| ways.map(|way| format!("{name}{way}"))) {
        let row = rows.get(&name).unwrap_or_else(|| panic!("no row {name}"));
        for figure in ["value", "ceiling", "ratio", "cpu_s_per_gb"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{name}: {figure}");
        }
        assert!(row["peer"]["value"].as_f64().unwrap() > 0.0, "{name}");
    }
    for other in ["direct", "batch", "kernel"] {
        assert!(rows.contains_key(&format!("copy.h2d.paged.64kib.{other}")), "{other}");
    }
    for name in ["matmul_slowdown", "matvec_slowdown", "p2p_slowdown"] {
        assert!(rows.contains_key(&format!("copy.victim.{name}")), "{name}");
    }
    for name in ["copy.adaptive.slowed_link", "copy.adaptive.slowed_link.fixed"] {
        assert!(rows[name]["ratio"].as_f64().unwrap() > 0.0, "{name}");
    }
    let figure = |name: &str| rows[name]["value"].as_f64().unwrap();
    assert!(figure("copy.cpu_cores") > 0.0);
    assert!(figure("copy.idle.cpu_core") < 1.0);
    // Staging is stated in docs; what a fake driver takes for itself is nothing.
    assert!((1.0..=64.0).contains(&figure("copy.hbm_mib.per_relay")));
    assert!(rows.contains_key("copy.first_copy_extra_ms"));
    let picture = std::fs::read_to_string(plot).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("from one GPU"));
}

#[test]
fn one_gpu_is_measured_without_what_needs_two() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("copy.json");
    let mut args = SMALL.to_vec();
    args.extend(["--direction", "h2d", "--json", json.to_str().unwrap()]);
    let ran = bench(&args, &[("FAKE_CUDA_GPUS", "1")]);
    assert!(ran.status.success(), "{}", said(&ran));
    assert!(said(&ran).contains("left out"), "{}", said(&ran));
    let rows = rows(&json);
    assert!(rows.contains_key("copy.h2d.1gpu.16mib") && rows.contains_key("copy.h2d.paged.64kib"));
    assert!(rows.keys().all(|name| !name.contains("victim") && !name.contains("allgpus")));
    assert!(rows.keys().all(|name| !name.contains("d2h") && !name.contains("both")));
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_what_is_allowed() {
    let cases: [(&[&str], &str); 7] = [
        (&["--sizes", "4kb"], "allowed: b, kib, mib, gib"),
        (&["--sizes", "0kib"], "allowed: from 1 b"),
        (&["--paths", "eager"], "possible values: direct, chain, mover, best"),
        (&["--direction", "sideways"], "possible values: h2d, d2h, both"),
        (&["--gpus", "2"], "--gpus: 2 does not exist; 2 GPUs are visible"),
        (&["--pages", "3kib", "--pages-total", "1mib"], "no multiple of a page of 3kib"),
        (&["--host", "--sizes", "4kib"], "cannot be used with"),
    ];
    for (args, expected) in cases {
        let ran = bench(&[&["bench", "copy", "--runs", "1"], args].concat(), &[]);
        assert!(!ran.status.success(), "{args:?}");
        assert!(said(&ran).contains(expected), "{args:?}: {}", said(&ran));
    }
}

#[test]
fn whoever_asks_for_gpus_is_not_given_host_memory_instead() {
    let ran =
        bench(&["bench", "copy", "--sizes", "4kib"], &[("FOREBAY_LIBCUDA", "/nonexistent/libcuda.so.1")]);
    assert!(!ran.status.success());
    assert!(said(&ran).contains("no CUDA driver"), "{}", said(&ran));
}
