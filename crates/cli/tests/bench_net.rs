//! `forebay bench net` as its users run it: its axes on a few small blocks, with the real other
//! process, and what it refuses.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(["bench", "net"]).args(args).output().unwrap()
}

/// Two runs of eight small blocks, written.
fn small(args: &[&str]) -> Output {
    let usual = ["--only", "rate", "--op", "write", "--block-size", "64KiB", "--batch", "8", "--runs", "2"];
    bench(&[&usual, args].concat())
}

fn told(ran: &Output) -> String {
    String::from_utf8_lossy(&ran.stderr).into_owned()
}

/// The names of the rows that a benchmark has shown.
fn rows(ran: &Output) -> Vec<String> {
    assert!(ran.status.success(), "{}", told(ran));
    let table = String::from_utf8_lossy(&ran.stdout).into_owned();
    table.lines().skip(1).filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

#[test]
fn each_axis_has_rows_of_its_own_and_the_usual_ones_keep_their_names() {
    assert_eq!(rows(&small(&[])), ["net.write.64kib"]);
    let both = small(&["--op", "read", "--threads", "1,3", "--segment", "memfd"]);
    let names = ["net.write.64kib", "net.write.64kib.3threads", "net.read.64kib", "net.read.64kib.3threads"];
    assert_eq!(rows(&both), names.map(|name| format!("{name}.memfd")));
}

#[test]
fn huge_pages_are_measured_or_it_is_said_why_not() {
    let ran = small(&["--segment", "heap,hugepages"]);
    let found = rows(&ran);
    match &found[..] {
        [one] => assert!(one == "net.write.64kib" && told(&ran).contains("hugepages is left out: ")),
        both => {
            assert_eq!(both, ["net.write.64kib", "net.write.64kib.hugepages"]);
            assert!(told(&ran).contains("were in huge pages"), "{}", told(&ran));
        }
    }
}

#[test]
fn bytes_take_the_rail_or_it_is_said_that_there_is_none() {
    for rail in ["memory", "tcp=lo"] {
        let ran = small(&["--rail", rail, "--threads", "2"]);
        if told(&ran).contains("libucp.so.0") {
            testkit::skipped(format_args!("{}", told(&ran)));
            return;
        }
        assert_eq!(rows(&ran), ["net.ucx.write.64kib.2threads"], "{rail}");
    }
    let nowhere = small(&["--rail", "tcp=nosuch0"]);
    assert!(!nowhere.status.success() && told(&nowhere).contains("nosuch0"), "{}", told(&nowhere));
}

#[test]
fn what_cannot_be_measured_is_refused_with_what_is_allowed() {
    let cases: [(&[&str], &str); 7] = [
        (&["--threads", "9", "--block-size", "64KiB", "--batch", "8"], "as many as blocks, 8"),
        (&["--threads", "0"], "1..=64"),
        (&["--segment", "vram"], "possible values: heap, memfd, hugepages"),
        (&["--rail", "infiniband"], r#"allowed are "memory", "rdma" and "tcp""#),
        (&["--rail", "tcp="], "empty device"),
        (&["--rail", "memory", "--only", "rate,tls"], "--rail is an axis of rates"),
        (&["--threads", "2", "--peer", "true"], "--threads says nothing to the programs of --peer"),
    ];
    for (args, why) in cases {
        let refused = bench(args);
        assert!(!refused.status.success() && told(&refused).contains(why), "{args:?}: {}", told(&refused));
    }
}
