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

#[test]
fn every_gpu_of_a_driver_is_shown_and_the_worst_finding_is_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("seen.json");
    let preflight = |faults: &str| {
        let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["preflight", "gpu", "--json"])
            .arg(&json)
            .env("FOREBAY_LIBCUDA", &fake_cuda_install::installed().libcuda)
            .env("FAKE_CUDA_FAULTS", faults)
            .output()
            .unwrap();
        let seen: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        (ran.status.code().unwrap(), String::from_utf8(ran.stdout).unwrap(), seen)
    };
    let (code, told, seen) = preflight("p2p off");
    assert_eq!((code, &seen["severity"]), (1, &"warning".into()), "{told}");
    assert!(told.contains("no GPU reaches the memory of another"), "{told}");
    let gpus = seen["host"]["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 4);
    assert!(gpus.iter().all(|gpu| told.contains(gpu["pci"]["address"].as_str().unwrap())), "{told}");
    let (code, told, _) = preflight("version 12000");
    assert!(code == 2 && told.contains("12.4 or later"), "{told}");
}

#[test]
fn what_was_measured_is_shown_and_is_there_the_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let preflight = |options: &[&str]| {
        let json = folder.path().join("seen.json");
        let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["preflight", "gpu", "--json"])
            .arg(&json)
            .args(options)
            .env("FOREBAY_LIBCUDA", &fake_cuda_install::installed().libcuda)
            .env("XDG_CACHE_HOME", folder.path())
            .envs([("FAKE_CUDA_GPUS", "2"), ("FAKE_CUDA_RATES", "h2d=0.4,d2h=0.4,p2p=2")])
            .output()
            .unwrap();
        let told =
            format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        let seen = std::fs::read(json).unwrap_or_else(|error| panic!("{error}: {told}"));
        let seen: Value = serde_json::from_slice(&seen).unwrap();
        (told, seen["measured"].clone())
    };
    assert!(preflight(&[]).1.is_null());
    let (told, measured) = preflight(&["--measure"]);
    assert!(told.contains("GB/s, as measured") && told.contains("to a GPU: several paths"), "{told}");
    assert_eq!(measured["pairs"].as_array().unwrap().len(), 2);
    assert_eq!(preflight(&[]).1, measured);
}
