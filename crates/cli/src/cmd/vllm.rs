//! `forebay vllm serve`: becomes `vllm serve` with Forebay's connector, beside the node of this
//! host or one that it starts. It knows the connector's configuration and which of vLLM's options
//! would take its place; what is computed and loaded is vLLM's and the connector's.
//!
//! As this process becomes vLLM, signals and exit codes are vLLM's own. A node that was started
//! here is a child of it, and the system ends that child when vLLM ends, however that ends.

use super::node_socket::{self, NoPlace, Seen};
use super::python::{NotAsked, Python, allowed_plugins};
use super::values::size;
use clap::Subcommand;
use forebay_client::ConnectError;
use forebay_cuda::preflight::{Finding, Severity};
use forebay_node::MemoryBound;
use forebay_results::output::CommandResult;
use serde_json::json;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What `vllm` runs.
const ENTRY: [&str; 2] = ["-m", "vllm.entrypoints.cli.main"];
/// Takes the configuration of a connector.
pub const TRANSFER_OPTION: &str = "--kv-transfer-config";
/// Options with which vLLM takes another connector, or another configuration of this one.
const TAKEN: [&str; 2] = ["kv-transfer-config", "kv-offloading-size"];
/// Shorter beginnings of them are those of other options too.
const SHORTEST: usize = "kv-t".len();
/// Names a file with options of vLLM.
const FILE: &str = "--config";
const OWN: [&str; 2] = ["--node", "--node-memory"];
/// Of the memory that is left a node takes a quarter, in whole units, and so much at most.
const SHARE: u64 = 4;
const UNIT_BYTES: u64 = 64 << 20;
const MEMORY_MAX_BYTES: u64 = 64 << 30;

/// Arguments of `forebay vllm`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Run `vllm serve` with the connector; where no node answers, start one that ends with vLLM
    Serve(Serve),
}

#[derive(clap::Args)]
struct Serve {
    /// Socket of the node [default: the first that answers of /run/forebay/node.sock and the one
    /// that `forebay node --memory` takes]
    #[arg(long, value_name = "SOCKET")]
    node: Option<PathBuf>,
    /// Memory of the node if one has to be started [default: a quarter of what is left, 64GiB at
    /// most]
    #[arg(long, value_name = "SIZE", value_parser = size::<u64>)]
    node_memory: Option<u64>,
    /// The model and options of `vllm serve`
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "MODEL")]
    arguments: Vec<OsString>,
}

/// Why vLLM was not started.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("{0} would replace the connector's configuration: leave it out, or run `vllm serve` itself")]
    Taken(String),
    #[error("{0} is an option of forebay: put it before the model")]
    Misplaced(String),
    #[error(transparent)]
    Python(#[from] NotAsked),
    #[error("{python} has no {package}: pip install {package} for it, or name another in FOREBAY_PYTHON")]
    Missing { python: String, package: &'static str },
    #[error("{}: {}", .0.what, .0.action)]
    Unfit(Finding),
    #[error("the node at {}: {error}", socket.display())]
    Refused { socket: PathBuf, error: ConnectError },
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
    #[error("how much memory is left is not known: say --node-memory")]
    UnknownMemory,
    #[error("{left_bytes} bytes are left of {what}, too few for a node: free some, or say --node-memory")]
    LittleMemory { left_bytes: u64, what: String },
    #[error("the node at {} has ended: its last lines say why", .0.display())]
    Ended(PathBuf),
    #[error("{python}: {error}")]
    NotRun { python: String, error: std::io::Error },
}

/// Runs the command.
pub fn run(args: Args) -> CommandResult {
    let What::Serve(serve) = args.what;
    serve.run()
}

impl Serve {
    /// Becomes vLLM; returns only if that fails.
    fn run(self) -> CommandResult {
        check_arguments(&self.arguments)?;
        let python = Python::find();
        check_packages(&python)?;
        let socket = self.node()?;
        let mut command = python.command();
        command
            .args(ENTRY)
            .arg("serve")
            .args(&self.arguments)
            .args([TRANSFER_OPTION, &transfer_config(&socket)]);
        Err(ServeError::NotRun { python: python.name(), error: command.exec() }.into())
    }

    /// The socket of a node that answers, if need be of one that is started.
    fn node(&self) -> Result<PathBuf, forebay_results::output::Error> {
        for socket in self.node.clone().map_or_else(node_socket::usual, |socket| vec![socket]) {
            match node_socket::look(&socket) {
                Seen::Node(stat) => {
                    let capacity = stat.capacity_bytes >> 20;
                    eprintln!("forebay: the node at {} has {capacity} MiB", socket.display());
                    if self.node_memory.is_some() {
                        eprintln!("forebay: --node-memory changes nothing, since that node runs already");
                    }
                    return Ok(socket);
                }
                Seen::Refused(error) if self.node.is_some() => {
                    return Err(ServeError::Refused { socket, error }.into());
                }
                Seen::Refused(error) => eprintln!("forebay: the node at {}: {error}", socket.display()),
                Seen::Nobody(_) => {}
            }
        }
        let socket = self.node.clone().map_or_else(node_socket::of_user, Ok)?;
        start(&socket, self.memory()?)?;
        Ok(socket)
    }

    fn memory(&self) -> Result<u64, ServeError> {
        if let Some(bytes) = self.node_memory {
            return Ok(bytes);
        }
        let MemoryBound { what, left_bytes, .. } =
            MemoryBound::tightest().ok_or(ServeError::UnknownMemory)?;
        share(left_bytes).ok_or(ServeError::LittleMemory { left_bytes, what })
    }
}

/// What a node takes of the memory that is left, if that is enough for one.
fn share(left_bytes: u64) -> Option<u64> {
    let bytes = (left_bytes / SHARE).min(MEMORY_MAX_BYTES);
    Some(bytes / UNIT_BYTES * UNIT_BYTES).filter(|bytes| *bytes > 0)
}

/// Refuses what vLLM would take in place of our configuration, and our own options behind the
/// model.
fn check_arguments(arguments: &[OsString]) -> Result<(), ServeError> {
    let mut arguments = arguments.iter().map(|argument| argument.to_string_lossy());
    while let Some(argument) = arguments.next() {
        let option = argument.split(['=', '.']).next().unwrap_or_default();
        if OWN.contains(&option) {
            return Err(ServeError::Misplaced(option.into()));
        }
        if option.strip_prefix("--").is_some_and(is_taken) {
            return Err(ServeError::Taken(option.into()));
        }
        if option == FILE {
            let named = argument.split_once('=').map(|(_, file)| file.to_owned());
            check_file(&named.or_else(|| arguments.next().map(Into::into)).unwrap_or_default())?;
        }
    }
    Ok(())
}

/// The same for vLLM's file of options, a YAML mapping. One that cannot be read is vLLM's to judge.
fn check_file(file: &str) -> Result<(), ServeError> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let key = |line: &str| line.split_once(':').map(|(key, _)| key.trim_matches(['"', '\'']).to_owned());
    match text.lines().filter_map(key).find(|key| is_taken(key)) {
        Some(key) => Err(ServeError::Taken(format!("{key} in {file}"))),
        None => Ok(()),
    }
}

/// vLLM takes `_` for `-`, and the beginning of an option for the option.
fn is_taken(name: &str) -> bool {
    let name = name.replace('_', "-");
    name.len() >= SHORTEST && TAKEN.iter().any(|taken| taken.starts_with(&name))
}

/// Refuses a Python in which vLLM or the connector would not start.
fn check_packages(python: &Python) -> Result<(), ServeError> {
    let packages = python.ask()?;
    for (there, package) in [(&packages.vllm, "vllm"), (&packages.forebay, "forebay")] {
        if there.is_none() {
            return Err(ServeError::Missing { python: python.name(), package });
        }
    }
    let found = packages.checks(allowed_plugins().as_deref()).into_iter().map(|check| check.finding);
    match found.into_iter().find(|finding| finding.severity == Severity::Fault) {
        Some(fault) => Err(ServeError::Unfit(fault)),
        None => Ok(()),
    }
}

/// The connector's configuration, for vLLM's option [`TRANSFER_OPTION`]. The plug-in of the package
/// has registered its name.
pub fn transfer_config(socket: &Path) -> String {
    json!({
        "kv_connector": "ForebayConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": socket.to_string_lossy()},
    })
    .to_string()
}

/// Starts a node, which ends with this process, and waits until it accepts clients. It is in a
/// group of its own: a `^C` is for vLLM, which uses the node until its end.
fn start(socket: &Path, memory_bytes: u64) -> Result<(), forebay_results::output::Error> {
    let memory = forebay_transfer::size::write(memory_bytes);
    eprintln!("forebay: no node answers; one with {memory} is started at {}", socket.display());
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--end-with", &std::process::id().to_string(), "node", "--memory", &memory, "--socket"]);
    let mut node =
        command.arg(socket).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let mut line = String::new();
    if let Some(said) = node.stdout.take() {
        BufReader::new(said).read_line(&mut line)?;
    }
    if line.is_empty() {
        node.wait()?;
        return Err(ServeError::Ended(socket.into()).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(argument: &str) -> Result<(), ServeError> {
        check_arguments(&["model".into(), argument.into(), "value".into()])
    }

    #[test]
    fn what_would_replace_the_connectors_configuration_is_refused_however_it_is_written() {
        for argument in [
            "--kv-transfer-config",
            "--kv-transfer-config={}",
            "--kv_transfer_config",
            "--kv-transfer-config.kv_role",
            "--kv-transfer",
            "--kv-offloading-size",
            "--kv_offloading_size=4",
        ] {
            let refused = check(argument).unwrap_err().to_string();
            assert!(refused.contains("would replace") && refused.starts_with("--kv"), "{refused}");
        }
        for argument in
            ["--kv-cache-dtype", "--kv-events-config", "--kv", "--no-enable-prefix-caching", "-tp"]
        {
            assert!(check(argument).is_ok(), "{argument}");
        }
    }

    #[test]
    fn a_configuration_in_vllms_file_of_options_is_refused_too() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("options.yaml");
        let check = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let file = file.display();
            let both = [vec![format!("--config={file}")], vec!["--config".into(), file.to_string()]];
            both.map(|given| check_arguments(&given.into_iter().map(Into::into).collect::<Vec<_>>()))
        };
        for text in ["port: 1\nkv-transfer-config: '{}'\n", "kv_transfer_config:\n  kv_role: kv_both\n"] {
            for refused in check(text).map(|refused| refused.unwrap_err().to_string()) {
                assert!(refused.starts_with("kv") && refused.contains("options.yaml would"), "{refused}");
            }
        }
        assert!(check("port: 1\nmodel: kv\n").iter().all(Result::is_ok));
        assert!(check_arguments(&["--config".into()]).is_ok(), "vLLM says what is wrong");
    }

    #[test]
    fn an_option_of_ours_behind_the_model_is_refused_and_not_passed_on() {
        for argument in ["--node", "--node-memory", "--node-memory=8GiB"] {
            assert!(check(argument).unwrap_err().to_string().contains("before the model"), "{argument}");
        }
        assert!(check("--node-rank").is_ok(), "that is vLLM's");
    }

    #[test]
    fn a_node_takes_a_quarter_of_what_is_left_and_64_gib_at_most() {
        let gib = |gib: u64| gib << 30;
        assert_eq!(share(gib(20)), Some(gib(5)));
        assert_eq!(share(gib(2000)), Some(MEMORY_MAX_BYTES));
        assert_eq!(share(4 * UNIT_BYTES + 5), Some(UNIT_BYTES));
        assert_eq!(share(4 * UNIT_BYTES - 1), None);
    }

    #[test]
    fn the_configuration_names_the_connector_without_a_module_and_the_node() {
        let config: serde_json::Value = serde_json::from_str(&transfer_config(Path::new("/n.sock"))).unwrap();
        assert_eq!(config["kv_connector"], "ForebayConnector");
        assert_eq!(config["kv_connector_extra_config"]["node"], "/n.sock");
        assert!(config.get("kv_connector_module_path").is_none());
    }
}
