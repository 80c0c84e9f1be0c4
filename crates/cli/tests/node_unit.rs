//! The unit with which systemd runs `forebay node`: what it says fits the program, and systemd
//! understands it.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// The unit that is shipped.
fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/forebay-node.service");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_unit_runs_commands_that_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("node.toml");
    let socket = folder.path().join("node.sock");
    std::fs::write(&config, format!("socket = {socket:?}\n[memory]\nsize = '8MiB'\n")).unwrap();
    let unit = unit();
    let commands = unit.lines().filter_map(|line| line.strip_prefix("ExecStart"));
    let mut checked = 0;
    for command in commands.map(|line| line.split_once('=').unwrap().1) {
        let words = command.strip_prefix("/usr/bin/forebay ").unwrap().split(' ');
        let words = words.map(|word| if word.ends_with(".toml") { config.to_str().unwrap() } else { word });
        let words: Vec<&str> = words.filter(|word| *word != "--check-config").collect();
        // Whatever else it is told, this one only looks.
        let mut forebay = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let ran = forebay.args(&words).arg("--check-config").output().unwrap();
        assert!(ran.status.success(), "{command}: {}", String::from_utf8_lossy(&ran.stderr));
        checked += 1;
    }
    assert_eq!(checked, 2, "one before the start, and the start");
}

/// What the unit says of a key in one of its sections.
fn in_unit(section: &str, key: &str) -> Option<String> {
    let unit = unit();
    let lines = unit.lines().skip_while(|line| *line != format!("[{section}]")).skip(1);
    let mut lines = lines.take_while(|line| !line.starts_with('['));
    lines.find_map(|line| line.strip_prefix(&format!("{key}=")).map(str::to_owned))
}

#[test]
fn the_unit_waits_for_a_node_that_starts_or_ends_and_never_gives_up() {
    let limits = forebay_node::LimitsConfig::default();
    let stop_s: u64 = in_unit("Service", "TimeoutStopSec").unwrap().parse().unwrap();
    assert!(stop_s > limits.drain_s + limits.close_s + 5, "{stop_s}");
    // A second for each GiB of 1 TiB.
    assert_eq!(in_unit("Service", "TimeoutStartSec").as_deref(), Some("30min"));
    assert_eq!(in_unit("Unit", "StartLimitIntervalSec").as_deref(), Some("0"));
    for hides in ["PrivateTmp", "ProtectClock", "ProtectProc", "PrivateDevices"] {
        assert_eq!(in_unit("Service", hides), None, "it hides what a node has to see");
    }
    assert_eq!(in_unit("Service", "ProtectSystem").as_deref(), Some("full"), "logs may be on any disk");
}

#[test]
fn the_user_of_the_unit_is_one_that_systemd_makes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/forebay.sysusers");
    let users = std::fs::read_to_string(&path).unwrap();
    let user = in_unit("Service", "User").unwrap();
    assert!(users.lines().any(|line| line.starts_with(&format!("u {user} "))), "{users}");
    let Ok(ran) = Command::new("systemd-sysusers").arg("--dry-run").arg(&path).output() else {
        testkit::skipped("systemd-sysusers is not installed");
        return;
    };
    // It ends well also where it ignores what it does not understand.
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    let known = said.contains(&format!("Creating group '{user}'")) || said.is_empty();
    assert!(ran.status.success() && known, "{said}");
}

#[test]
fn systemd_understands_the_unit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("forebay-node.service");
    std::fs::write(&path, unit().replace("/usr/bin/forebay", env!("CARGO_BIN_EXE_forebay"))).unwrap();
    let Ok(ran) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() else {
        testkit::skipped("systemd-analyze is not installed");
        return;
    };
    // It ends well in spite of keys that it does not know.
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success() && !said.contains("forebay-node"), "{said}");
}
