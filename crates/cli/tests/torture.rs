//! `forebay torture` as its users run it: quick, with real processes and real kills.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn torture(dir: &Path, args: &[&str]) -> Output {
    let forebay = env!("CARGO_BIN_EXE_forebay");
    Command::new(forebay).args(["torture", "--quick", "--dir"]).arg(dir).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The value of a row in a file of results.
fn figure(results: &serde_json::Value, name: &str) -> f64 {
    let rows = results["rows"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == name).unwrap()["value"].as_f64().unwrap()
}

#[test]
fn forebay_returns_no_wrong_byte_and_the_suite_finds_those_of_a_store_without_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("torture.json");
    let ran = torture(dir.path(), &["--json", json.to_str().unwrap()]);
    let (table, told) = (text(&ran.stdout), text(&ran.stderr));
    assert!(ran.status.success(), "{table}\n{told}");

    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(figure(&results, "torture.forebay.failed"), 0.0, "{told}");
    assert_eq!(figure(&results, "torture.forebay.wrong_bytes"), 0.0, "{told}");
    assert_eq!(figure(&results, "torture.forebay.crash_points"), 40.0, "{told}");
    assert!(figure(&results, "torture.forebay.faults") >= 28.0, "{told}");
    assert_eq!(figure(&results, "torture.node.failed"), 0.0, "{told}");
    assert_eq!(figure(&results, "torture.node.wrong_bytes"), 0.0, "{told}");
    assert!(figure(&results, "torture.node.faults") >= 24.0, "{told}");
    assert!(figure(&results, "torture.file-per-object.wrong_bytes") > 0.0, "{told}");
    let failed = |case: &str| {
        let told_of = |line: &&str| line.starts_with(&format!("file-per-object: {case} ("));
        told.lines().find(told_of).unwrap().contains("FAIL")
    };
    for case in ["bit flips", "torn sectors", "stale values", "power loss at every write", "two owners"] {
        assert!(failed(case), "{case}: {told}");
    }
    for case in ["misdirected pages, read", "misdirected pages, written", "flips after verification"] {
        assert!(failed(case), "{case}: {told}");
    }
    let row = |case: &str| table.lines().find(|line| line.starts_with(&format!("| {case} |"))).unwrap();
    for (case, cells) in [
        ("misdirected pages, read", "| pass | n/a | **FAIL** |"),
        ("misdirected pages, written", "| pass | n/a | **FAIL** |"),
        ("flips after verification", "| pass | pass | **FAIL** |"),
        ("torn records", "| pass | pass | n/a |"),
        ("torn requests", "| n/a | pass | n/a |"),
        ("torn answers", "| n/a | pass | n/a |"),
    ] {
        assert!(row(case).ends_with(cells), "{case}: {told}");
    }
    for reason in
        ["its files hold no records beside values", "it has no ring", "its disk I/O is the node's own"]
    {
        assert!(told.contains(&format!("n/a {reason}")), "{reason}: {told}");
    }
    for case in ["warm restart", "deleted files", "short I/O", "EINTR storm", "SIGKILL loop"] {
        assert!(!failed(case), "{case}: {told}");
    }
    // Nothing is left behind.
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["torture.json"]);
}

#[test]
fn whoever_checks_nothing_is_given_wrong_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let unchecked_log = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torture_stores/unchecked_log.py");
    let failed = |only: &str, args: &[&str]| {
        let ran = torture(dir.path(), &[&["--only", only], args].concat());
        let told = text(&ran.stderr);
        assert!(told.contains("**FAIL**") && told.contains("values are wrong"), "{only}: {told}");
    };
    failed("flips after", &["--store", "node-unverified"]);
    failed("torn answers", &["--store", "node-unverified"]);
    failed("torn records", &["--store", "file-per-object", "--program", unchecked_log]);
}

#[test]
fn the_worker_of_the_documentation_is_one() {
    let document = include_str!("../../../docs/torture.md");
    let code = document.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("dictionary");
    std::fs::write(&program, format!("#!/usr/bin/env python3\n{code}")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let args = |only| ["--store", "file-per-object", "--only", only, "--program", program.to_str().unwrap()];

    let forgets = text(&torture(dir.path(), &args("warm restart")).stdout);
    assert!(forgets.contains("| warm restart | pass | **FAIL** |"), "{forgets}");
    let answers = text(&torture(dir.path(), &args("staging")).stdout);
    assert!(answers.contains("| staging exhaustion | pass | pass |"), "{answers}");
}

#[test]
fn what_cannot_be_run_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refused = torture(dir.path(), &["--store", "lmcache"]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("--lmcache-python"), "{}", text(&refused.stderr));
    let nowhere = torture(&dir.path().join("missing"), &[]);
    assert!(text(&nowhere.stderr).contains("--dir"), "{}", text(&nowhere.stderr));
}
