//! `forebay engine --ssd` as its users run it: what one process computed the next one finds on
//! disk.
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// An engine over a log at `ssd`, and its address. Nothing, loudly, where there is no direct I/O.
fn start(ssd: &Path) -> Option<(Child, String)> {
    let mut engine = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["engine", "--port", "0", "--cuda-graphs", "--memory", "64MiB", "--ssd-size", "64MiB", "--ssd"])
        .arg(ssd)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    BufReader::new(engine.stdout.as_mut().unwrap()).read_line(&mut told).unwrap();
    if let Some(at) = told.find("http://") {
        let address = told[at + 7..].split_whitespace().next().unwrap().to_owned();
        return Some((engine, address));
    }
    let ended = engine.wait_with_output().unwrap();
    let why = String::from_utf8_lossy(&ended.stderr);
    assert!(why.contains("direct I/O"), "{told}{why}");
    testkit::skipped(why);
    None
}

/// What the engine says of a prompt of 1,100 tokens, which are four chunks and a bit.
fn details(address: &str) -> Value {
    let prompt: Vec<u32> = (0..1_100).collect();
    let body = json!({ "prompt": prompt, "max_tokens": 2 }).to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    write!(stream, "{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let answer: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    answer["usage"]["prompt_tokens_details"].clone()
}

fn terminate(mut engine: Child) {
    let sent = Command::new("kill").args(["-TERM", &engine.id().to_string()]).status().unwrap();
    assert!(sent.success() && engine.wait().unwrap().success());
}

#[test]
fn what_an_engine_computed_before_it_was_terminated_the_next_one_loads_from_disk() {
    let directory = tempfile::tempdir().unwrap();
    let Some((engine, address)) = start(directory.path()) else { return };
    let cold = details(&address);
    assert_eq!(cold["ssd_cached_tokens"].as_u64().unwrap_or(0), 0, "{cold}");
    terminate(engine);
    let log = directory.path().join("forebay.log");
    let stat =
        Command::new(env!("CARGO_BIN_EXE_forebay")).args(["store", "stat"]).arg(&log).output().unwrap();
    let stat = String::from_utf8(stat.stdout).unwrap();
    assert!(stat.contains("closed in good order"), "{stat}");
    let (engine, address) = start(&log).unwrap();
    let warm = details(&address);
    assert_eq!(warm["ssd_cached_tokens"], 1_024, "{warm}");
    terminate(engine);
}
