//! `forebay trace replay` beside an `nvidia-smi`: one that says what GPUs do, and ones that do not.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Engine(Child, String);

impl Engine {
    fn start() -> Engine {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["engine", "--port", "0", "--clock-ratio", "50"]);
        let mut engine = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut told = String::new();
        BufReader::new(engine.stdout.as_mut().unwrap()).read_line(&mut told).unwrap();
        let at = told.find("http://").unwrap_or_else(|| panic!("{told}"));
        let url = told[at..].split_whitespace().next().unwrap().to_owned();
        Engine(engine, url)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Puts a program of this name and text into the folder.
fn install(folder: &Path, script: &str) {
    let program = folder.join("nvidia-smi");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Replays two requests that are 1.2 real seconds apart. Returns its stderr, its results and its
/// page.
fn replay(folder: &Path, engine: &Engine) -> (String, String, String) {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let request = |at_ms: u64, hash: u64| {
        format!("{{\"timestamp\":{at_ms},\"input_length\":512,\"output_length\":4,\"hash_ids\":[{hash}]}}\n")
    };
    std::fs::write(path("trace.jsonl"), request(0, 1) + &request(60_000, 2)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["trace", "replay", &path("trace.jsonl"), "--target", &engine.1, "--clock-ratio", "50"]);
    command.args([
        "--log",
        &path("records.jsonl"),
        "--json",
        &path("results.json"),
        "--html",
        &path("page.html"),
    ]);
    // The system's own programs, and first of all ours.
    command.env("PATH", format!("{}:/usr/bin:/bin", folder.display()));
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
    (said, read("results.json"), read("page.html"))
}

#[test]
fn what_gpus_do_is_in_the_results_and_on_the_page() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), Engine::start());
    let asked = folder.path().join("asked");
    install(folder.path(), &format!("echo \"$@\" >> {}; echo '87, 61234'; echo '13, 4'", asked.display()));
    let (said, results, page) = replay(folder.path(), &engine);
    assert!(!said.contains("no GPU utilisation"), "{said}");
    let asked = std::fs::read_to_string(asked).unwrap();
    let query = "--query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits";
    assert!(asked.lines().all(|line| line == query), "{asked}");
    assert!((2..=3).contains(&asked.lines().count()), "once a second: {asked}");
    for name in ["gpu0.busy_percent_mean", "gpu1.busy_percent_mean", "gpu0.memory_mib_max"] {
        assert!(results.contains(&format!("replay.replay.{name}")), "{results}");
    }
    assert!(page.contains("id=\"plot-gpus-0\""));
}

#[test]
fn without_gpus_one_line_says_so_and_the_replay_goes_on() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), Engine::start());
    for (script, reason) in [
        (None, "nvidia-smi cannot be run: "),
        (
            Some("echo 'No devices were found'; exit 6"),
            "nvidia-smi ended with exit status: 6: No devices were found",
        ),
        (Some("echo '[N/A], [N/A]'"), "nvidia-smi says \"[N/A], [N/A]\""),
    ] {
        script.iter().for_each(|script| install(folder.path(), script));
        let (said, results, page) = replay(folder.path(), &engine);
        let told = format!("forebay: no GPU utilisation in the report: {reason}");
        assert_eq!(said.matches(&told).count(), 1, "{said}");
        assert!(!results.contains("replay.replay.gpu") && !page.contains("plot-gpus"), "{results}");
        std::fs::remove_file(folder.path().join("records.jsonl")).unwrap();
    }
}

#[test]
fn one_that_hangs_holds_up_nothing_and_ends_with_the_replay() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), Engine::start());
    let pid = folder.path().join("pid");
    install(folder.path(), &format!("echo $$ > {}; exec sleep 1000", pid.display()));
    let since = Instant::now();
    replay(folder.path(), &engine);
    assert!(since.elapsed() < Duration::from_secs(60));
    let pid = std::fs::read_to_string(pid).unwrap();
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    let is_alive =
        || stat().rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'));
    while is_alive() {
        assert!(since.elapsed() < Duration::from_secs(120), "it goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
}
