//! `forebay route`: route requests to engines.

/// Arguments of `forebay route`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> crate::CommandResult {
    Err("not built yet".into())
}
