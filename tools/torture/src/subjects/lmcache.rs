//! The worker of LMCache's local disk backend: a Python script that is part of this crate and run
//! by an interpreter that has LMCache. This file knows how it is started; what it does is in the
//! script.

use crate::worker::Launch;
use std::ffi::OsString;
use std::path::Path;

const WORKER: &str = include_str!("lmcache_worker.py");

/// How to start the worker with the interpreter `python`.
pub fn launch(python: &Path, quiet: bool) -> Launch {
    let args = [OsString::from("-c"), OsString::from(WORKER)];
    Launch { program: python.into(), args: args.into(), quiet }
}
