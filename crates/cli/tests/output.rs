//! What commands print, when whoever reads has gone or cannot take it: `forebay ... | head -1` ends
//! as it would have without `head`, and a full disk behind stdout is an error.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// A pipe that nobody reads any more.
fn broken() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn forebay(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(args);
    command
}

/// Runs a command that nobody reads, and says how it ended, and what it says on stderr where that
/// is read.
fn unread(args: &[&str]) -> (ExitStatus, String) {
    let ran = forebay(args).stdout(broken()).output().unwrap();
    let blind = forebay(args).stdout(broken()).stderr(broken()).status().unwrap();
    assert!(blind.code().is_some_and(|code| code != 101), "{args:?} with both closed: {blind}");
    (ran.status, String::from_utf8_lossy(&ran.stderr).into_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_command_whose_reader_has_gone_does_its_work_and_says_nothing_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (log, config) = (folder.path().join("log"), folder.path().join("node.toml"));
    let socket = folder.path().join("node.sock");
    std::fs::write(&config, format!("socket = {socket:?}\n[memory]\nsize = '8MiB'\n")).unwrap();
    let made = forebay(&["store", "init", text(&log), "--size", "16M", "--segment", "1M"]).output().unwrap();
    if !made.status.success() {
        let why = String::from_utf8_lossy(&made.stderr);
        return testkit::skipped(format_args!("no log can be made: {why}"));
    }
    for args in [
        &["store", "init", text(&log), "--size", "16M", "--segment", "1M", "--force"][..],
        &["store", "stat", text(&log)],
        &["store", "stat", text(&log), "--json"],
        &["store", "verify", text(&log)],
        &["store", "scrub", text(&log)],
        &["store", "purge", text(&log), "--tenant", "1"],
        &["store", "recover", text(&log), "--unreadable"],
        &["node", "--check-config", "--config", text(&config)],
        &["--help"],
        &["--version"],
    ] {
        let (status, told) = unread(args);
        assert!(status.success() && told.is_empty(), "{args:?}: {status}: {told}");
    }
    // These may find this machine unfit, or want more arguments.
    for args in [&["preflight"][..], &["trace"], &["nothing"], &["store", "stat", "/nosuch"]] {
        let (status, told) = unread(args);
        assert!(status.code().is_some_and(|code| code != 101), "{args:?}: {status}: {told}");
        assert!(!told.contains("Broken pipe"), "{args:?}: {told}");
    }
}

#[test]
fn what_could_not_be_printed_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("node.toml");
    let socket = folder.path().join("socket");
    let toml = format!("socket = '{}'\n[memory]\nsize = '8MiB'\n", socket.display());
    std::fs::write(&config, toml).unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let check = ["node", "--check-config", "--config", text(&config)];
    let ran = forebay(&check).stdout(full).stderr(Stdio::piped()).output().unwrap();
    let told = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{told}");
    assert!(told.contains("writing to stdout: No space left"), "{told}");
}
