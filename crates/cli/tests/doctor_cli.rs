//! `forebay doctor` on a machine with nothing, and beside a node.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// The exit code, what was printed, and the findings by their checks.
fn doctor(folder: &Path, python: &str) -> (i32, String, HashMap<String, Value>) {
    let json = folder.join("seen.json");
    let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .arg("doctor")
        .arg("--node")
        .arg(folder.join("node.sock"))
        .arg("--json")
        .arg(&json)
        .env("FOREBAY_PYTHON", python)
        .env("FOREBAY_LIBCUDA", folder.join("libcuda.so.1"))
        .env_remove("VLLM_PLUGINS")
        .output()
        .unwrap();
    let told = String::from_utf8(ran.stdout).unwrap();
    let seen: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let findings = seen["findings"].as_array().unwrap().iter();
    let by_check = findings.map(|each| (each["check"].as_str().unwrap().to_owned(), each.clone())).collect();
    (ran.status.code().unwrap(), told, by_check)
}

#[test]
fn a_machine_with_nothing_gets_verdicts_and_what_is_not_known_is_never_ok() {
    let folder = tempfile::tempdir().unwrap();
    let (code, told, found) = doctor(folder.path(), "/no/such/python");
    for check in ["package", "glibc", "gpu", "memory", "pages", "memlock", "shm", "io_uring", "node"] {
        assert!(found.contains_key(check), "{check}: {told}");
        assert!(told.contains(&format!(" {check}: ")), "{told}");
    }
    assert_eq!(found["package"]["severity"], "unknown", "no Python says what it has");
    assert!(found["package"]["what"].as_str().unwrap().contains("/no/such/python"), "{told}");
    assert_eq!(found["node"]["severity"], "note", "a node need not run");
    assert!(code >= 1, "{told}");
}

#[test]
fn a_node_that_answers_is_ok_and_something_else_at_its_socket_is_a_fault() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("node.sock");
    let mut node = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["node", "--memory", "64MiB", "--socket"])
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(node.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let (_, told, found) = doctor(folder.path(), "/no/such/python");
    assert_eq!(found["node"]["severity"], "ok", "{told}");
    assert!(told.contains("of 64 MiB are used"), "{told}");
    node.kill().unwrap();
    node.wait().unwrap();
    std::fs::remove_file(&socket).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept()));
    let (code, told, found) = doctor(folder.path(), "/no/such/python");
    assert_eq!((code, &found["node"]["severity"]), (2, &"fault".into()), "{told}");
    hangs_up.join().unwrap();
}
