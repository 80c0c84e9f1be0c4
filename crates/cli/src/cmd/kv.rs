//! `forebay kv`: says of single chunks, by name, that they are to stay, to come into memory, to
//! leave it or to be forgotten, and where they are. The node judges; this file asks it and prints.

use super::node_socket;
use super::prompt_file::read_tokens;
use super::values::chunk_id;
use forebay_client::protocol::control::{Control, Report, Verb};
use forebay_client::{ClientOptions, ask_control, ask_names};
use forebay_kv::ChunkId;
use forebay_results::output::CommandResult;
use forebay_store::TenantId;
use std::path::PathBuf;

/// Arguments of `forebay kv`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Where chunks are, and for how long they are pinned
    List(Chunks),
    /// Keep chunks from being evicted from where they are
    Pin {
        #[command(flatten)]
        chunks: Chunks,
        /// For how long: 24 hours at most
        #[arg(long, value_name = "SECONDS", default_value_t = 300)]
        ttl: u64,
    },
    /// Let chunks be evicted again
    Unpin(Chunks),
    /// Have chunks come into memory from the SSD or from peers, before they are asked for
    Prefetch(Chunks),
    /// Have chunks leave memory, as far as they are on the SSD
    Demote(Chunks),
    /// Have chunks be gone from this node and its peers, and their bytes overwritten in memory and
    /// on the SSD
    Forget(Chunks),
}

#[derive(clap::Args)]
struct Chunks {
    /// The node's socket [default: that of the host's node, or of this user's]
    #[arg(long, value_name = "SOCKET")]
    node: Option<PathBuf>,
    /// File with the token that the node asks for
    #[arg(long, value_name = "FILE")]
    node_token: Option<PathBuf>,
    /// Chunk ids in hexadecimal, the first one of the prompt first
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = chunk_id)]
    keys: Vec<ChunkId>,
    /// Instead of --keys: file with a prompt's tokens, a JSON list or what vLLM's /tokenize
    /// answers; '-' for standard input. Its chunks are meant in each namespace that the tenant's
    /// engines use
    #[arg(long, value_name = "FILE", conflicts_with = "keys", required_unless_present = "keys")]
    prompt_file: Option<PathBuf>,
    /// Whose chunks they are
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    tenant: u16,
    /// Print the answers as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> CommandResult {
    match args.command {
        Command::List(chunks) => chunks.ask(Verb::List),
        Command::Pin { chunks, ttl } => chunks.ask(Verb::Pin { ttl_ms: ttl.saturating_mul(1000) }),
        Command::Unpin(chunks) => chunks.ask(Verb::Unpin),
        Command::Prefetch(chunks) => chunks.ask(Verb::Prefetch),
        Command::Demote(chunks) => chunks.ask(Verb::Demote),
        Command::Forget(chunks) => chunks.ask(Verb::Forget),
    }
}

impl Chunks {
    fn ask(self, verb: Verb) -> CommandResult {
        let socket = self.node.clone().unwrap_or_else(node_socket::usual_one);
        let options = node_socket::options("kv", &socket, self.node_token.as_deref())?;
        let options = ClientOptions { tenant: TenantId(self.tenant), ..options };
        let sequences = match &self.prompt_file {
            None => vec![self.keys],
            Some(file) => named(&options, &read_tokens("--prompt-file", file)?)?,
        };
        let mut told = Vec::new();
        for ids in sequences {
            let reports = ask_control(&options, Control { verb, ids: ids.clone() })?;
            told.extend(ids.into_iter().zip(reports));
        }
        match self.json {
            true => {
                let all: Vec<_> = told.iter().map(|(id, report)| as_json(id, report)).collect();
                println!("{:#}", serde_json::json!({ "verb": verb.name(), "chunks": all }));
            }
            false => told.iter().for_each(|(id, report)| println!("{}", line_of(id, report))),
        }
        Ok(())
    }
}

/// The chunks of a prompt in each namespace of the tenant's engines.
fn named(options: &ClientOptions, tokens: &[u32]) -> Result<Vec<Vec<ChunkId>>, String> {
    let named = ask_names(options, tokens).map_err(|error| error.to_string())?;
    let (tenant, tokens) = (options.tenant.0, tokens.len());
    match named.iter().all(Vec::is_empty) {
        true if named.is_empty() => {
            Err(format!("--prompt-file: no engine of tenant {tenant} has told this node how it names chunks"))
        }
        true => Err(format!("--prompt-file: {tokens} tokens are less than a chunk")),
        false => Ok(named),
    }
}

fn as_json(id: &ChunkId, report: &Report) -> serde_json::Value {
    serde_json::json!({
        "id": id.to_string(),
        "verdict": report.verdict.name(),
        "reason": report.reason.name(),
        "place": report.place_name(),
        "pinned_ms": report.pinned_ms,
    })
}

fn line_of(id: &ChunkId, report: &Report) -> String {
    let pinned = match report.pinned_ms {
        0 => String::new(),
        left_ms => format!(", pinned for {} s", left_ms.div_ceil(1000)),
    };
    let why = match report.reason.name() {
        "none" => String::new(),
        reason => format!(": {reason}"),
    };
    format!("{id} {}{why}; {}{pinned}", report.verdict.name(), report.place_name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_client::protocol::control::{Reason, Verdict};
    use forebay_client::protocol::explain::Place;

    #[test]
    fn a_line_says_what_became_of_a_chunk_why_and_where_it_is() {
        let id = ChunkId::from_bytes([0xab; 32]);
        let mut report = Report::new(Verdict::Clipped, Reason::TtlCut);
        (report.place, report.pinned_ms) = (Place::Disk, 1500);
        let said = line_of(&id, &report);
        assert!(said.ends_with("ab clipped: ttl_cut; disk, pinned for 2 s"), "{said}");
        let said = line_of(&id, &Report::new(Verdict::Accepted, Reason::None));
        assert!(said.ends_with("ab accepted; nowhere"), "{said}");
    }
}
