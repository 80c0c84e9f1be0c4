//! `forebay engine`: run an emulated engine.

/// Arguments of `forebay engine`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> crate::CommandResult {
    Err("not built yet".into())
}
