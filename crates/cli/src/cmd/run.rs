//! `forebay run`: becomes another program whose CUDA copies are offered to Forebay. It knows where
//! the preload lies and how the dynamic linker is told of it; what the preload does is its own, and
//! `FOREBAY_PRELOAD` stays the user's.

use super::program::{self, Unfit};
use forebay_cuda::remote::RELAYS_VARIABLE;
use forebay_results::output::CommandResult;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE: &str = "libforebay_preload.so";
const LD_PRELOAD: &str = "LD_PRELOAD";

/// Arguments of `forebay run`.
#[derive(clap::Args)]
pub struct Args {
    /// When the program ends, print how its copies were done
    #[arg(long)]
    stats: bool,
    /// Socket of a node whose relays are used too, for programs that use Forebay themselves, such
    /// as vLLM's sleep mode
    #[arg(long, value_name = "SOCKET")]
    relays: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Why the program was not started.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{FILE} is not in {} nor in ../lib beside it", .0.display())]
    NoLibrary(PathBuf),
    #[error("the dynamic linker takes no path with spaces or colons: {}", .0.display())]
    Path(PathBuf),
    #[error("{0}: start it without `forebay run`")]
    Unfit(#[from] Unfit),
    #[error("{}: {why}", .program.to_string_lossy())]
    Program { program: OsString, why: std::io::Error },
}

/// Replaces this process by the program; returns only if that fails.
pub fn run(args: Args) -> CommandResult {
    let library = library_near(&std::env::current_exe()?)?;
    let Some((program, arguments)) = args.command.split_first() else { return Ok(()) };
    program::check(program, std::env::var_os("PATH").as_deref(), &library).map_err(RunError::Unfit)?;
    let mut command = Command::new(program);
    command.args(arguments).env(LD_PRELOAD, preloads(&library, std::env::var_os(LD_PRELOAD).as_deref()));
    if args.stats {
        command.env("FOREBAY_PRELOAD", "stats");
    }
    if let Some(socket) = args.relays {
        command.env(RELAYS_VARIABLE, socket);
    }
    Err(RunError::Program { program: program.clone(), why: command.exec() }.into())
}

/// The library in the folder of a binary of ours, or in `lib` beside that folder.
pub fn library_near(binary: &Path) -> Result<PathBuf, RunError> {
    let folder = binary.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(FILE), folder.join("../lib").join(FILE)];
    let found = places.into_iter().find_map(|place| place.canonicalize().ok());
    let library = found.ok_or_else(|| RunError::NoLibrary(folder.to_path_buf()))?;
    let separated =
        library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b':'));
    if separated { Err(RunError::Path(library)) } else { Ok(library) }
}

/// First ours, then those that were there: an interposer before ours that hooks `dlsym` would go
/// round it.
fn preloads(library: &Path, others: Option<&OsStr>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}
