//! `forebay node` without a file: what its options make of a configuration, and what is refused.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// Whether the command ended well, and what it said of the configuration.
fn check(folder: &Path, options: &[&str]) -> (bool, String) {
    let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["node", "--check-config"])
        .args(options)
        .current_dir(folder)
        .env("XDG_RUNTIME_DIR", folder)
        .output()
        .unwrap();
    let said = if ran.status.success() { ran.stdout } else { ran.stderr };
    (ran.status.success(), String::from_utf8(said).unwrap())
}

#[test]
fn options_make_the_configuration_that_a_file_would_make() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        ["--memory", "64MiB", "--socket", "node.sock", "--ssd", "./one:256MiB", "--ssd", ".:1.5GiB"];
    let (is_well, by_options) = check(folder.path(), &options);
    assert!(is_well, "{by_options}");
    let file = "socket = 'node.sock'\n[memory]\nsize = '64MiB'\n[[ssd]]\npath = './one'\nsize = '256MiB'\n\
        [[ssd]]\npath = './forebay.log'\nsize = '1.5GiB'\n";
    std::fs::write(folder.path().join("node.toml"), file).unwrap();
    assert_eq!(check(folder.path(), &["--config", "node.toml"]), (true, by_options.clone()));
    // What is printed is a file to begin with.
    std::fs::write(folder.path().join("printed.toml"), &by_options).unwrap();
    assert_eq!(check(folder.path(), &["--config", "printed.toml"]), (true, by_options));
}

#[test]
fn a_node_without_a_socket_takes_one_of_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let (is_well, said) = check(folder.path(), &["--memory", "64MiB"]);
    let own = folder.path().join("forebay/node.sock");
    let is_root = rustix::process::geteuid().is_root();
    let expected = if is_root { Path::new("/run/forebay/node.sock") } else { &own };
    assert!(is_well && said.contains(&format!("socket = {expected:?}")), "{said}");
}

#[test]
fn what_is_not_allowed_is_refused_as_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for (options, says) in [
        (&[][..], "<--config <FILE>|--memory <SIZE>>"),
        (&["--config", "x", "--memory", "1GiB"], "cannot be used with"),
        (&["--config", "x", "--socket", "y"], "cannot be used with"),
        (&["--config", "x", "--ssd", "y:1GiB"], "cannot be used with"),
        (&["--socket", "y"], "<--config <FILE>|--memory <SIZE>>"),
        (&["--memory", "1GB"], "'1GB' is no size in whole bytes; allowed is"),
        (&["--memory", "1KiB", "--socket", "y"], "memory.size is 1KiB; allowed is"),
        (&["--memory", "64MiB", "--socket", "no/y"], "socket is \"no/y\", whose directory is not there"),
        (&["--memory", "64MiB", "--socket", "y", "--ssd", "log"], "'log' is not FILE_OR_DIR:SIZE"),
        (&["--memory", "64MiB", "--socket", "y", "--ssd", "log:1KiB"], "ssd.size is 1KiB; allowed is"),
        (&["--memory", "64MiB", "--socket", "y", "--ssd", "log:x"], "'x' is no size in whole bytes"),
    ] {
        let (is_well, said) = check(folder.path(), options);
        assert!(!is_well && said.contains(says), "{options:?}: {said}");
    }
}
