//! `forebay bench`: each benchmark measures one part beside its ceiling and writes the results object.

/// Arguments of `forebay bench`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args) -> crate::CommandResult {
    Err("not built yet".into())
}
