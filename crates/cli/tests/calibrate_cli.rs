//! `forebay calibrate` where there is nothing to measure, and profiles in files where profiles are
//! named. What a calibration finds is tested with the crate that measures.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments);
    command
}

#[test]
fn an_engine_that_cannot_be_measured_has_no_profile() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("mine.toml");
    let output =
        forebay(&["calibrate", "http://127.0.0.1:9", "--out", out.to_str().unwrap()]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && !out.exists());
    assert!(said.starts_with("forebay: /v1/models of the server: "), "{said}");
}

#[test]
fn arguments_that_make_no_sense_are_refused_before_anything_is_sent() {
    for (arguments, reason) in [
        (["--out", "profile", "--time", "60"], "'profile' does not end in .toml"),
        (["--out", "a.toml", "--time", "91"], "--time is 91 s; allowed are at most 90 s"),
        (["--out", "a.toml", "--max-num-seqs", "0"], "invalid value '0'"),
        (["--out", "a.toml", "--like", "b300"], "unknown profile \"b300\""),
        (["--out", "/nowhere/a.toml", "--time", "60"], "--out /nowhere/a.toml: No such file or directory"),
    ] {
        let output = forebay(&["calibrate", "http://127.0.0.1:9"]).args(arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(reason), "{said}");
    }
}

#[test]
fn a_profile_in_a_file_is_what_an_engine_emulates() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let shipped = include_str!("../../steps/profiles/h100-llama-3.1-8b.toml");
    let mine = shipped.replace("meta-llama/Llama-3.1-8B-Instruct", "mine/model");
    std::fs::write(&file, mine).unwrap();
    let mut engine = forebay(&["engine", "--port", "0", "--profile", file.to_str().unwrap()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    BufReader::new(engine.stdout.as_mut().unwrap()).read_line(&mut told).unwrap();
    engine.kill().unwrap();
    engine.wait().unwrap();
    assert!(told.contains("mine/model"), "{told}");
}
