//! `forebay explain`: why a prompt was no hit. The node says what it knows, `choose` finds the
//! namespace that is meant, `verdict` judges, and `show` prints. This file reads what is asked.

mod choose;
mod show;
mod verdict;

use super::node_socket;
use super::values::chunk_id;
use forebay_client::protocol::explain::{Explained, Prompt};
use forebay_client::{ClientOptions, ask_why};
use forebay_kv::ChunkId;
use forebay_results::output::{CommandResult, Error};
use forebay_store::TenantId;
use serde::Deserialize;
use std::path::{Path, PathBuf};

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
    /// With --tokens: a fact of the namespace that is meant, such as dtype=bfloat16; repeat for each
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
        explained = Explained { requests, ..ask(&options, Prompt::Tokens(read_tokens(file)?))? };
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

/// Tokens of a prompt, as a list or as vLLM's /tokenize answers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Tokens {
    List(Vec<u32>),
    Tokenized { tokens: Vec<u32> },
}

fn read_tokens(file: &Path) -> Result<Vec<u32>, Error> {
    let text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(file),
    };
    let text = text.map_err(|error| format!("--tokens: {}: {error}", file.display()))?;
    let allowed = "allowed is a JSON list of numbers, or an object with one as `tokens`";
    match serde_json::from_str(&text) {
        Ok(Tokens::List(tokens) | Tokens::Tokenized { tokens }) => Ok(tokens),
        Err(error) => Err(format!("--tokens: {}: {error}; {allowed}", file.display()).into()),
    }
}

fn fact(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("it is not FACT=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_a_list_or_what_vllm_answers_and_anything_else_is_refused() {
        let read = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            read_tokens(file.path()).map_err(|error| error.to_string())
        };
        assert_eq!(read("[1, 2]"), Ok(vec![1, 2]));
        assert_eq!(read(r#"{"count": 1, "tokens": [7]}"#), Ok(vec![7]));
        for wrong in ["", "1 2", "[-1]", r#"{"prompt": "a"}"#] {
            assert!(read(wrong).unwrap_err().contains("allowed is a JSON list"), "{wrong}");
        }
    }
}
