//! `forebay preflight` as its users run it.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::Command;

#[test]
fn a_machine_without_a_driver_gets_one_line_and_2() {
    let folder = tempfile::tempdir().unwrap();
    let (driver, json) = (folder.path().join("libcuda.so.1"), folder.path().join("seen.json"));
    let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["preflight", "gpu", "--json"])
        .arg(&json)
        .env("FOREBAY_LIBCUDA", &driver)
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(2));
    let told = String::from_utf8(ran.stdout).unwrap();
    assert!(
        told.lines().count() == 1 && told.starts_with("fault: ") && told.contains("libcuda.so.1"),
        "{told}"
    );
    let json: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(json["severity"], "fault");
    assert!(json["host"].is_null());
    assert_eq!(json["findings"].as_array().unwrap().len(), 1);
}
