//! Files with the tokens of a prompt.

use serde::Deserialize;
use std::path::Path;

/// Tokens of a prompt, as a list or as vLLM's /tokenize answers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Tokens {
    List(Vec<u32>),
    Tokenized { tokens: Vec<u32> },
}

/// The tokens in a file, or '-' for standard input, that this option names.
pub fn read_tokens(option: &str, file: &Path) -> Result<Vec<u32>, String> {
    let text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(file),
    };
    let text = text.map_err(|error| format!("{option}: {}: {error}", file.display()))?;
    let allowed = "allowed is a JSON list of numbers, or an object with one as `tokens`";
    match serde_json::from_str(&text) {
        Ok(Tokens::List(tokens) | Tokens::Tokenized { tokens }) => Ok(tokens),
        Err(error) => Err(format!("{option}: {}: {error}; {allowed}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_a_list_or_what_vllm_answers_and_anything_else_is_refused() {
        let read = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            read_tokens("--tokens", file.path())
        };
        assert_eq!(read("[1, 2]"), Ok(vec![1, 2]));
        assert_eq!(read(r#"{"count": 1, "tokens": [7]}"#), Ok(vec![7]));
        for wrong in ["", "1 2", "[-1]", r#"{"prompt": "a"}"#] {
            assert!(read(wrong).unwrap_err().contains("allowed is a JSON list"), "{wrong}");
        }
    }
}
