//! `forebay vllm serve` with a stand-in for Python: what it is told, what runs beside it, and what
//! is refused before anything is started.
#![allow(clippy::unwrap_used)]

use forebay_client::{Client, ClientOptions};
use forebay_transfer::{Limits, MoverThread, Place};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;
use testkit::eventually;

const PACKAGES: &str = concat!(
    r#"{"python": "3.12.3", "vllm": "0.33.0", "plugins": ["forebay"], "import_error": null, "forebay": ""#,
    env!("CARGO_PKG_VERSION"),
    r#""}"#
);

/// A folder with a Python that says what it has and, as vLLM, what it was told, line by line. Then
/// it serves until a signal, which it answers with code 7.
struct Site {
    folder: TempDir,
}

impl Site {
    fn new(packages: &str) -> Site {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "#!/bin/sh\ncase $2 in -c) echo '{packages}'; exit;; esac\ntrap 'exit 7' TERM INT\n\
             for word; do echo \"$word\"; done; echo $$\nwhile :; do sleep 0.01; done\n"
        );
        let python = folder.path().join("python");
        std::fs::write(&python, script).unwrap();
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        Site { folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("node.sock")
    }

    fn serve(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["vllm", "serve", "--node"]).arg(self.socket()).args(arguments);
        command.env("FOREBAY_PYTHON", self.folder.path().join("python")).env_remove("VLLM_PLUGINS");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What is said where vLLM is not started.
    fn refused(&self, arguments: &[&str]) -> String {
        let Output { status, stderr, stdout } = self.serve(arguments).output().unwrap();
        let said = String::from_utf8(stderr).unwrap();
        assert!(!status.success() && stdout.is_empty(), "{said}");
        assert!(!self.socket().exists(), "no node was started");
        said
    }
}

/// A vLLM that serves, and what it was told.
struct Serving {
    child: Child,
    told: Vec<String>,
}

impl Serving {
    fn start(mut command: Command) -> Serving {
        let mut child = command.spawn().unwrap();
        let id = child.id().to_string();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let told: Vec<String> = lines.take_while(|line| *line != id).collect();
        assert!(child.try_wait().unwrap().is_none(), "vLLM is this process itself, and serves: {told:?}");
        Serving { child, told }
    }

    fn node(&self) -> serde_json::Value {
        let config: serde_json::Value = serde_json::from_str(self.told.last().unwrap()).unwrap();
        config["kv_connector_extra_config"]["node"].clone()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // One that has ended is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn answers(socket: &Path) -> bool {
    let mover = MoverThread::spawn(Limits::default()).unwrap();
    let client = Client::connect(&mover.handle(), Place::Host(0), ClientOptions::new(socket));
    client.is_ok_and(|client| client.stat().is_some())
}

#[test]
fn vllm_is_told_of_a_node_that_is_started_and_ends_with_it() {
    let site = Site::new(PACKAGES);
    let mut serving =
        Serving::start(site.serve(&["--node-memory", "64MiB", "tiny model", "--port", "1", "-tp=2"]));
    let told: Vec<&str> = serving.told.iter().map(String::as_str).collect();
    let expected = [
        "-P",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "tiny model",
        "--port",
        "1",
        "-tp=2",
        "--kv-transfer-config",
    ];
    assert_eq!(told[..told.len() - 1], expected);
    assert_eq!(serving.node(), site.socket().to_str().unwrap());
    assert!(answers(&site.socket()), "the node is there before vLLM is");
    kill_process(Pid::from_child(&serving.child), Signal::TERM).unwrap();
    assert_eq!(serving.child.wait().unwrap().code(), Some(7), "the exit code is vLLM's");
    eventually("the node has ended", || !answers(&site.socket()));
}

#[test]
fn a_node_ends_also_with_a_vllm_that_is_killed() {
    let site = Site::new(PACKAGES);
    let mut serving = Serving::start(site.serve(&["--node-memory", "64MiB", "model"]));
    assert!(answers(&site.socket()));
    serving.child.kill().unwrap();
    eventually("the node has ended", || !answers(&site.socket()));
}

#[test]
fn a_node_that_answers_is_used_and_left_running() {
    let site = Site::new(PACKAGES);
    let mut node = Command::new(env!("CARGO_BIN_EXE_forebay"));
    node.args(["node", "--memory", "64MiB", "--socket"]).arg(site.socket()).stdout(Stdio::piped());
    let mut node = node.spawn().unwrap();
    BufReader::new(node.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let mut serving = Serving::start(site.serve(&["--node-memory", "1GiB", "model"]));
    assert_eq!(serving.node(), site.socket().to_str().unwrap());
    let mut said = String::new();
    serving.child.kill().unwrap();
    serving.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("has 64 MiB") && said.contains("--node-memory changes nothing"), "{said}");
    serving.child.wait().unwrap();
    assert!(answers(&site.socket()));
    node.kill().unwrap();
    node.wait().unwrap();
}

#[test]
fn what_cannot_work_is_refused_before_a_node_is_started() {
    let without = |field: &str| PACKAGES.replace(field, "\"none\"");
    for (packages, arguments, said) in [
        (PACKAGES.to_owned(), &["model", "--kv-transfer-config", "{}"][..], "would replace the connector's"),
        (PACKAGES.to_owned(), &["model", "--node-memory", "1GiB"], "put it before the model"),
        (PACKAGES.to_owned(), &["--node-memory", "1KiB", "model"], "memory.size is 1KiB; allowed is"),
        (PACKAGES.replace("\"0.33.0\"", "null"), &["model"], "has no vllm: pip install vllm"),
        (PACKAGES.replace("\"0.33.0\"", "\"0.20.1\""), &["model"], "vLLM 0.20.1; 0.26 to 0.33 are supported"),
        (without("\"forebay\"]").replace("\"none\"", "\"none\"]"), &["model"], "is not registered with vLLM"),
        ("no JSON".into(), &["model"], "does not say what it has"),
    ] {
        let refused = Site::new(&packages).refused(arguments);
        assert!(refused.contains(said), "{refused}");
    }
    let left_out = Site::new(PACKAGES).serve(&["model"]).env("VLLM_PLUGINS", "lora").output().unwrap();
    assert!(String::from_utf8_lossy(&left_out.stderr).contains("leaves the plug-in forebay out"));
}
