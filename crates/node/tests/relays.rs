//! A node whose GPUs relay for engines, on the fake driver: it starts them if told to, and says why
//! if it cannot. The driver is chosen by a variable, so each test runs this binary again with the
//! one that it needs.

#![allow(clippy::unwrap_used)]

use forebay_cuda::remote::{NodeRelays, RelaysAt, Status};
use forebay_cuda::{Copier, CopierOptions};
use forebay_node::{Node, NodeConfig, RelayGpus, RelaysConfig};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const ROLE: &str = "FOREBAY_TEST_ROLE";
const FOLDER: &str = "FOREBAY_TEST_FOLDER";

#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    match role.as_str() {
        "relaying" => relaying(&folder),
        "engine" => engine(&folder),
        "unknown_gpu" => assert_eq!(
            refusal(&folder, RelayGpus::These(vec!["00".repeat(16)])).split(';').next().unwrap(),
            format!("relays: gpus: {} is not visible here", "00".repeat(16))
        ),
        "no_driver" => {
            let why = refusal(&folder, RelayGpus::All);
            assert!(why.starts_with("relays: no CUDA driver: /nowhere/libcuda.so.1"), "{why}");
            drop(Node::start(&NodeConfig::new(folder.join("plain.sock"), 64 << 20)).unwrap());
        }
        other => panic!("{other}"),
    }
}

fn command(role: &str, folder: &Path, driver: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env("FOREBAY_LIBCUDA", driver);
    command.env(ROLE, role).env(FOLDER, folder);
    command
}

fn check(output: Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
}

fn play(role: &str, driver: &Path) {
    let folder = tempfile::tempdir().unwrap();
    check(command(role, folder.path(), driver).output().unwrap());
}

#[test]
fn an_engine_attaches_to_a_node_and_outlives_it() {
    play("relaying", &fake_cuda_install::installed().libcuda);
}

#[test]
fn a_gpu_that_is_not_there_is_named_at_the_start() {
    play("unknown_gpu", &fake_cuda_install::installed().libcuda);
}

#[test]
fn without_a_driver_a_node_that_is_to_relay_says_so_and_others_start() {
    play("no_driver", Path::new("/nowhere/libcuda.so.1"));
}

fn config(folder: &Path, gpus: RelayGpus) -> NodeConfig {
    let relays = RelaysConfig { gpus, ..RelaysConfig::new(folder.join("relays.sock")) };
    NodeConfig { relays: Some(relays), ..NodeConfig::new(folder.join("node.sock"), 64 << 20) }
}

fn refusal(folder: &Path, gpus: RelayGpus) -> String {
    Node::start(&config(folder, gpus)).map(drop).unwrap_err().to_string()
}

fn relaying(folder: &Path) {
    let node = Node::start(&config(folder, RelayGpus::All)).unwrap();
    assert_eq!(node.relays_stat().unwrap().gpus, 4);
    let driver = PathBuf::from(std::env::var("FOREBAY_LIBCUDA").unwrap());
    let mut engine = command("engine", folder, &driver);
    let mut engine = engine.env("CUDA_VISIBLE_DEVICES", "2").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(engine.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ATTACHED"));
    assert_eq!(node.relays_stat().unwrap().engines, 1);
    node.drain(Duration::ZERO).unwrap();
    assert!(!folder.join("relays.sock").exists());
    assert!(lines.any(|line| line.unwrap() == "DETACHED"));
    assert!(engine.wait().unwrap().success());
}

fn engine(folder: &Path) {
    let relays = NodeRelays::At(RelaysAt { socket: folder.join("relays.sock"), token: String::new() });
    let copier = Copier::start(&CopierOptions { relays, ..CopierOptions::default() }).unwrap();
    let attachment = copier.relays(0).unwrap();
    let status = attachment.wait(PATIENCE, |status| matches!(status, Status::Attached { .. }));
    assert_eq!(status, Status::Attached { relays: 3 });
    println!("\nATTACHED");
    let status = attachment.wait(PATIENCE, |status| matches!(status, Status::Detached { .. }));
    assert!(matches!(status, Status::Detached { .. }), "{status:?}");
    println!("\nDETACHED");
}
