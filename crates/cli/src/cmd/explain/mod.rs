//! `forebay explain`: why a prompt was no hit. The node says what it knows, `choose` finds the
//! namespace that is meant, `verdict` judges, and `show` prints. This file reads what is asked.

mod choose;
mod show;
mod verdict;

use super::node_socket;
use super::prompt_file::read_tokens;
use super::values::chunk_id;
use forebay_client::protocol::explain::{Explained, Prompt};
use forebay_client::{ClientOptions, ask_why};
use forebay_kv::ChunkId;
use forebay_results::output::{CommandResult, Error};
use forebay_store::TenantId;
use std::path::PathBuf;

/// A node that asks its peers takes longer than one that counts.
const ANSWER_LIMIT_US: u64 = 10_000_000;

/// Arguments of `forebay explain`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("prompt").required(true).multiple(true))]
pub struct Args {
    /// The node's socket [default: that of the host's node, or of this user's]
    #[arg(long, value_name = "SOCKET")]
    node: Option<PathBuf>,
    /// File with the token that the node asks for
    #[arg(long, value_name = "FILE")]
    node_token: Option<PathBuf>,
    /// File with the prompt's tokens: a JSON list, or what vLLM's /tokenize answers; '-' for
    /// standard input
    #[arg(long, value_name = "FILE", group = "prompt", conflicts_with = "keys")]
    tokens: Option<PathBuf>,
    /// Chunk ids in hexadecimal, the first one first
    #[arg(long, value_name = "ID", group = "prompt", value_delimiter = ',', value_parser = chunk_id)]
    keys: Vec<ChunkId>,
    /// The request's name at the engine, or a part of it: what the engine said of it
    #[arg(long, value_name = "NAME", group = "prompt", conflicts_with = "keys")]
    request: Option<String>,
    /// With --tokens: a fact of the namespace that is meant, such as dtype=bfloat16; repeat for
    /// each
    #[arg(long, value_name = "FACT=VALUE", value_parser = fact, requires = "tokens")]
    namespace: Vec<(String, String)>,
    /// With --keys: whose chunks they are
    #[arg(long, value_name = "NUMBER", default_value_t = 0, requires = "keys")]
    tenant: u16,
    /// Print all of it as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> CommandResult {
    let options = args.options()?;
    let mut explained = Explained::default();
    if let Some(name) = &args.request {
        explained = ask(&options, Prompt::Request(name.clone()))?;
        if explained.requests.is_empty() && args.tokens.is_none() {
            let why = "no engine has told this node of such a request, or it has given way to newer ones";
            return Err(format!("--request: {name:?}: {why}").into());
        }
    }
    if let Some(file) = &args.tokens {
        let requests = std::mem::take(&mut explained.requests);
        explained = Explained { requests, ..ask(&options, Prompt::Tokens(read_tokens("--tokens", file)?))? };
    } else if args.request.is_none() {
        explained = ask(&options, Prompt::Ids(args.keys.clone()))?;
    }
    let chosen = choose::choose(&explained.sequences, &args.namespace)?;
    let verdict = verdict::judge(&explained, &chosen);
    match args.json {
        true => show::as_json(&options.socket, &explained, &chosen, &verdict),
        false => show::as_text(&explained, &chosen, &verdict),
    }
    Ok(())
}

impl Args {
    fn options(&self) -> Result<ClientOptions, Error> {
        let socket = self.node.clone().unwrap_or_else(node_socket::usual_one);
        let options = node_socket::options("explain", &socket, self.node_token.as_deref())?;
        let (tenant, answer_limit_us) = (TenantId(self.tenant), ANSWER_LIMIT_US);
        Ok(ClientOptions { tenant, answer_limit_us, ..options })
    }
}

fn ask(options: &ClientOptions, prompt: Prompt) -> Result<Explained, Error> {
    Ok(ask_why(options, prompt)?)
}

fn fact(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("it is not FACT=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
