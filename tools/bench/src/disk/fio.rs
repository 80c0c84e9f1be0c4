//! fio, where it is installed: a second opinion on the ceiling. It knows fio's command line and its
//! JSON.

use super::file::TestFile;
use super::memory::{Direction, MIB, Objects};
use crate::output::Error;
use std::process::Command;

/// Which version is installed, if any.
pub fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().trim_start_matches("fio-").to_owned())
}

/// The rate of objects in the room behind the log.
pub fn mib_per_s(
    direction: Direction,
    file: &TestFile,
    objects: Objects,
    run_mib: u64,
) -> Result<f64, Error> {
    let (offset, size) = file.room();
    let (pattern, section) = match direction {
        Direction::Read => ("randread", "read"),
        Direction::Write => ("write", "write"),
    };
    let output = Command::new("fio")
        .args(["--name=raw", "--ioengine=io_uring", "--direct=1", "--registerfiles=1", "--fixedbufs=1"])
        .args(["--thread", "--output-format=json", "--randrepeat=0", "--norandommap=1"])
        .arg(format!("--filename={}", file.path().display()))
        .arg(format!("--rw={pattern}"))
        .arg(format!("--bs={}", objects.bytes))
        .arg(format!("--iodepth={}", objects.depth))
        .arg(format!("--offset={offset}"))
        .arg(format!("--size={size}"))
        .arg(format!("--io_size={}", run_mib * MIB))
        .output()?;
    let bytes_per_s = serde_json::from_slice::<serde_json::Value>(&output.stdout)
        .ok()
        .and_then(|report| report["jobs"][0][section]["bw_bytes"].as_f64())
        .filter(|_| output.status.success());
    let error = || format!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    bytes_per_s.map(|bytes| bytes / MIB as f64).ok_or_else(|| error().into())
}
