//! `forebay trace`: look at traces, cut samples from them, make new ones and replay them.

/// Arguments of `forebay trace`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> crate::CommandResult {
    Err("not built yet".into())
}
