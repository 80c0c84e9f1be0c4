//! `forebay doctor`: what is wrong with an installation, and what to do about it. `facts` looks,
//! `verdicts` judges; this file shows what came of it. What a host's copies are like is
//! `forebay preflight`'s to say.

mod facts;
mod verdicts;

use super::findings;
use super::python::allowed_plugins;
use facts::Facts;
use forebay_cuda::preflight::Severity;
use forebay_results::output::Error;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `forebay doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Socket of the node [default: the first that answers of /run/forebay/node.sock and the one
    /// that `forebay node --memory` takes]
    #[arg(long, value_name = "SOCKET")]
    node: Option<PathBuf>,
    /// Write all findings to a file as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command. The exit code is the worst finding's: 2 for a fault, 1 for a warning and for
/// what is not known, otherwise 0.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let checks = verdicts::checks(&Facts::gather(args.node.as_deref()), allowed_plugins().as_deref());
    checks.iter().for_each(|each| findings::print(Some(each.check), &each.finding));
    let worst = checks.iter().map(|each| each.finding.severity).max().unwrap_or(Severity::Ok);
    if let Some(file) = &args.json {
        findings::write(file, &json!({"severity": worst, "findings": checks}))?;
    }
    Ok(findings::exit_code(worst))
}
