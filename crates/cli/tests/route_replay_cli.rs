//! A decision log that a router wrote: `forebay route-replay` on it, whole and damaged, and what
//! `forebay trace replay` keeps of it.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn forebay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(arguments);
    command
}

/// A server, and its address.
fn serve(arguments: &[&str]) -> (Child, String) {
    let mut server = forebay(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut told = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut told).unwrap();
    let at = told.find("http://").unwrap_or_else(|| panic!("{told}")) + 7;
    let address = told[at..].split_whitespace().next().unwrap().to_owned();
    (server, address)
}

fn complete(address: &str) {
    let body = r#"{"prompt": [1, 2, 3], "max_tokens": 2}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn terminate(mut server: Child) {
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    server.wait().unwrap();
}

/// Starts an engine and a router that logs to a file, has a client use it, and ends both.
fn with_router(log: &Path, client: impl FnOnce(&str)) {
    let (engine, engine_address) = serve(&["engine", "--port", "0", "--clock-ratio", "100"]);
    let backend = format!("a=http://{engine_address}");
    let log = log.to_str().unwrap();
    let route = ["route", "--policy", "lpwl", "--listen", "127.0.0.1:0", "--shutdown-delay", "0"];
    let (router, address) = serve(&[&route[..], &["--backend", &backend, "--decision-log", log]].concat());
    client(&address);
    terminate(router);
    terminate(engine);
}

/// The log of four requests.
fn write_log(path: &Path) {
    with_router(path, |address| (0..4).for_each(|_| complete(address)));
}

fn replay(log: &Path, more: &[&str]) -> (Output, String, String) {
    let output = forebay(&["route-replay", log.to_str().unwrap()]).args(more).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    (output, said, complained)
}

#[test]
fn a_log_is_replayed_and_what_is_damaged_is_named_by_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("decisions.jsonl");
    write_log(&log);
    let json = folder.path().join("replay.json");
    let (output, said, complained) = replay(&log, &["--policy", "lpwl", "--json", json.to_str().unwrap()]);
    assert!(output.status.success() && complained.is_empty(), "{complained}");
    assert!(said.starts_with("4 decisions; 0 lines could not be read\n"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("lpwl ")) && !said.contains("lmetric"), "{said}");
    assert!(std::fs::read_to_string(&json).unwrap().contains("replay.lpwl.regret_mean"));

    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let by_load = lines[4].replace("\"policy\":\"lpwl\"", "\"policy\":\"least-loaded\"");
    assert_ne!(by_load, lines[4]);
    std::fs::write(&log, [&lines[..4], &[&by_load]].concat().join("\n")).unwrap();
    let (_, said, _) = replay(&log, &[]);
    assert!(said.starts_with("3 decisions; 0 lines could not be read\n1 more went by load,"), "{said}");

    let newer = lines[2].replace("\"version\":2", "\"version\":9");
    let long = "x".repeat(3 << 20);
    let cut = &lines[4][..lines[4].len() / 2];
    let damaged = [lines[0], lines[1], &newer, "", &long, "\u{0}garbage", lines[3], cut].join("\n");
    std::fs::write(&log, damaged).unwrap();
    let (output, said, complained) = replay(&log, &[]);
    assert!(output.status.success(), "{complained}");
    assert!(said.starts_with("2 decisions; 4 lines could not be read\n"), "{said}");
    for reason in [
        "line 3: version 9 is not read here; allowed is 2",
        "line 5: longer than 1 MiB",
        "line 6: no line of a decision log: ",
        "line 8: no line of a decision log: ",
    ] {
        assert!(complained.contains(reason), "{complained}");
    }

    // Without its first line nobody knows what the engines were taken for.
    std::fs::write(&log, lines[1]).unwrap();
    let (output, _, complained) = replay(&log, &[]);
    assert!(
        !output.status.success() && complained.contains("line 1: no line before it says"),
        "{complained}"
    );
    let (output, said, _) = replay(&log, &["--profile", "h100-llama-3.1-8b"]);
    assert!(output.status.success() && said.starts_with("1 decisions"), "{said}");
}

/// The arguments of a replay of three turns of a session.
fn trace_replay(folder: &Path, address: &str, log: &str) -> Output {
    let trace = folder.join("trace.jsonl");
    let turn = |turn: u64| {
        let at = turn * 1_000;
        let hashes: Vec<u64> = (0..=turn).collect();
        let input = 512 * (turn + 1);
        format!(
            "{{\"timestamp\":{at},\"input_length\":{input},\"output_length\":4,\"hash_ids\":{hashes:?}}}\n"
        )
    };
    std::fs::write(&trace, (0..3).map(turn).collect::<String>()).unwrap();
    let target = format!("http://{address}");
    let records = folder.join("records.jsonl");
    let arguments = ["trace", "replay", trace.to_str().unwrap(), "--target", &target, "--clock-ratio", "100"];
    let more = ["--decisions", log, "--log", records.to_str().unwrap()];
    forebay(&[&arguments[..], &more].concat()).output().unwrap()
}

#[test]
fn a_replay_keeps_the_decisions_of_its_own_requests_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("decisions.jsonl");
    with_router(&log, |address| {
        (0..4).for_each(|_| complete(address));
        let output = trace_replay(folder.path(), address, log.to_str().unwrap());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    let records = std::fs::read_to_string(folder.path().join("records.jsonl")).unwrap();
    let decisions: Vec<&str> =
        records.lines().filter(|line| line.contains("\"kind\":\"decision\"")).collect();
    assert_eq!(decisions.len(), 3, "{records}");
    assert!(decisions.iter().all(|line| !line.contains("\"ttft_s\":null")), "{decisions:?}");
    assert!(!records.contains("missing in the log"), "{records}");
}

#[test]
fn a_decision_log_that_is_not_there_is_named_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let output = trace_replay(folder.path(), "127.0.0.1:1", "no-such-log.jsonl");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no-such-log.jsonl"), "{said}");
    assert!(!folder.path().join("records.jsonl").exists());
}
