//! `forebay run` as a user has it: a binary with the preload near it.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A new folder where the binary is, so that it can be linked: a copy that is still open for
/// writing when another thread starts a program cannot be run.
fn beside() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The binary in `bin`, and a library without anything in it in `library_folder`.
fn install(root: &Path, library_folder: Option<&str>) -> PathBuf {
    std::fs::create_dir_all(root.join("bin")).unwrap();
    let binary = root.join("bin/forebay");
    let built = env!("CARGO_BIN_EXE_forebay");
    std::fs::hard_link(built, &binary).or_else(|_| std::fs::copy(built, &binary).map(drop)).unwrap();
    if let Some(folder) = library_folder {
        std::fs::create_dir_all(root.join(folder)).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-x", "c", "/dev/null", "-o"]);
        assert!(compiler.arg(library(root, folder)).status().unwrap().success());
    }
    binary
}

fn library(root: &Path, folder: &str) -> PathBuf {
    root.canonicalize().unwrap().join(folder).join("libforebay_preload.so")
}

fn run(binary: &Path, arguments: &[&str], preloaded: &str) -> Output {
    let mut command = Command::new(binary);
    command.arg("run").args(arguments).env("LD_PRELOAD", preloaded).env_remove("FOREBAY_PRELOAD");
    command.output().unwrap()
}

#[test]
fn the_program_is_run_with_the_library_before_all_others() {
    for folder in ["bin", "lib"] {
        let root = beside();
        let binary = install(root.path(), Some(folder));
        let ours = library(root.path(), folder).display().to_string();
        let script = "echo $LD_PRELOAD $FOREBAY_PRELOAD $0 $1; exit 7";
        for (others, list) in
            [("", ours.clone()), ("libm.so.6:libc.so.6", format!("{ours}:libm.so.6:libc.so.6"))]
        {
            let output = run(&binary, &["--", "sh", "-c", script, "--stats", "-x"], others);
            assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{list} --stats -x\n"));
            assert_eq!(output.status.code(), Some(7), "the program's own status");
        }
        let output = run(&binary, &["--stats", "sh", "-c", script], "");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{ours} stats sh\n"));
    }
}

#[test]
fn a_program_that_cannot_have_the_library_is_not_started_with_it() {
    let root = beside();
    let (binary, source, program) =
        (install(root.path(), Some("lib")), root.path().join("static.c"), root.path().join("static"));
    std::fs::write(&source, "void _start(void) { for (;;); }\n").unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-static", "-nostdlib"]).arg(&source).arg("-o").arg(&program);
    assert!(compiler.status().unwrap().success());
    let output = run(&binary, &["--", program.to_str().unwrap()], "");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("is linked statically") && error.contains("without `forebay run`"), "{error}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_cannot_be_run_is_said() {
    let whole = beside();
    let spaced =
        tempfile::Builder::new().prefix("with space").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bare = beside();
    for (root, library, program, said) in [
        (&whole, Some("lib"), "no-such-program", "forebay: no-such-program: No such file"),
        (&spaced, Some("lib"), "true", "forebay: the dynamic linker takes no path with spaces or colons: "),
        (&bare, None, "true", "forebay: libforebay_preload.so is not in "),
    ] {
        let output = run(&install(root.path(), library), &["--", program], "");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with(said), "{error}");
        assert_eq!(output.status.code(), Some(1));
    }
}
