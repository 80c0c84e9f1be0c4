//! LMCache's local disk backend, where a Python that has it is given: a process that makes a run
//! whenever it is told to. This file knows the words that are exchanged with
//! `bench/peers/lmcache_disk.py`.

use super::memory::Objects;
use crate::output::Error;
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Where the script is.
#[derive(clap::Args)]
// Clap names a group after each struct, and a build for tests refuses two of one name.
#[group(id = "lmcache")]
pub struct Args {
    /// Python interpreter that has LMCache, which then runs beside us
    #[arg(long, value_name = "PYTHON")]
    lmcache_python: Option<PathBuf>,
    /// The script that drives it
    #[arg(long, value_name = "FILE", default_value = "bench/peers/lmcache_disk.py")]
    lmcache_script: PathBuf,
}

/// A peer that waits to be told.
pub struct PeerProcess {
    child: Child,
    tell: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub version: String,
}

#[derive(Deserialize)]
struct Hello {
    version: String,
}

/// What a run gave.
#[derive(Deserialize)]
pub struct PeerRun {
    /// Until its index has all objects. They are not durable then.
    pub store_mib_per_s: f64,
    /// CPU time per object.
    pub store_cpu_us: f64,
    /// Batches, out of the page cache.
    pub retrieve_mib_per_s: f64,
    /// CPU time per object.
    pub retrieve_cpu_us: f64,
    /// Objects that did not come or were not right.
    pub wrong: u64,
}

impl PeerProcess {
    /// Starts it for objects of one size, if there is a Python for it.
    pub fn start(
        args: &Args,
        dir: &Path,
        objects: Objects,
        count: usize,
    ) -> Result<Option<PeerProcess>, Error> {
        let Some(python) = &args.lmcache_python else { return Ok(None) };
        let mut child = Command::new(python)
            .arg(&args.lmcache_script)
            .arg("--dir")
            .arg(dir.join(format!("forebay-bench-lmcache-{}-{}", std::process::id(), objects.bytes)))
            .args(["--object-bytes", &objects.bytes.to_string(), "--objects", &count.to_string(), "--direct"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", python.display()))?;
        let tell = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().ok_or("no pipe from the peer")?);
        let mut peer = PeerProcess { child, tell, answers, version: String::new() };
        peer.version = peer.answer::<Hello>()?.version;
        Ok(Some(peer))
    }

    pub fn run(&mut self) -> Result<PeerRun, Error> {
        writeln!(self.tell.as_mut().ok_or("no pipe to the peer")?, "run")?;
        let run: PeerRun = self.answer()?;
        if run.wrong > 0 {
            eprintln!("forebay: LMCache gave {} objects wrongly or not at all", run.wrong);
        }
        Ok(run)
    }

    /// The next line that is an object; whatever else the peer prints is passed by.
    fn answer<A: for<'de> Deserialize<'de>>(&mut self) -> Result<A, Error> {
        let mut line = String::new();
        while self.answers.read_line(&mut line)? > 0 {
            if line.starts_with('{') {
                return Ok(serde_json::from_str(&line)?);
            }
            line.clear();
        }
        Err("the peer ended before it answered".into())
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // The end of its input is the end of its work; it then removes its directory.
        self.tell = None;
        let _ = self.child.wait();
    }
}
