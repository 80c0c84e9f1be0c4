//! How a command talks to a server: the API key, other headers and whom it trusts.

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use std::path::PathBuf;

/// How the server is talked to. Keys are never arguments: others on the machine see those.
#[derive(clap::Args)]
pub struct Access {
    /// Environment variable that holds the API key, such as OPENAI_API_KEY
    #[arg(long, value_name = "VARIABLE", conflicts_with = "api_key_file")]
    api_key_env: Option<String>,
    /// File that holds the API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A header that every request has; repeat for each
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// For https: a PEM file with the certificates to trust instead of the system's
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

impl Access {
    /// The headers that every request has, with the API key if there is one.
    pub fn headers(&self) -> Result<HeaderMap, String> {
        let mut headers: HeaderMap = self.header.iter().cloned().collect();
        let (place, key) = match (&self.api_key_env, &self.api_key_file) {
            (Some(variable), _) => {
                let place = format!("environment variable {variable}");
                let key = std::env::var(variable).map_err(|error| format!("{place}: {error}"))?;
                (place, key)
            }
            (None, Some(path)) => {
                let place = path.display().to_string();
                let key = std::fs::read_to_string(path).map_err(|error| format!("{place}: {error}"))?;
                (place, key)
            }
            (None, None) => return Ok(headers),
        };
        let key = key.trim();
        let allowed = "an API key is one line of characters that a header may have";
        if key.is_empty() {
            return Err(format!("{place} is empty: {allowed}"));
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
            .map_err(|_| format!("{place} holds other characters: {allowed}"))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        Ok(headers)
    }
}

/// Reads `NAME: VALUE`. What the value is nobody shows again: it may be a key.
fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("it is not NAME: VALUE")?;
    let name: HeaderName =
        name.trim().parse().map_err(|_| format!("{name:?} is not the name of a header"))?;
    let mut value = HeaderValue::from_str(value.trim())
        .map_err(|_| format!("the value of {name} has characters that a header may not have"))?;
    value.set_sensitive(true);
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access { api_key_env: None, api_key_file: None, header: Vec::new(), ca: None }
    }

    #[test]
    fn a_key_comes_from_a_file_or_a_variable_and_is_not_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "sk-1\n").unwrap();
        let keyed = Access { api_key_file: Some(file.path().into()), ..access() };
        let headers = keyed.headers().unwrap();
        assert_eq!(headers[AUTHORIZATION], "Bearer sk-1");
        assert!(!format!("{headers:?}").contains("sk-1"));
        std::fs::write(file.path(), "\n").unwrap();
        assert!(keyed.headers().unwrap_err().contains("is empty"));
        std::fs::write(file.path(), "two\nlines").unwrap();
        let error = keyed.headers().unwrap_err();
        assert!(error.contains("other characters") && !error.contains("two"), "{error}");
        let unset = Access { api_key_env: Some("FOREBAY_NO_SUCH_VARIABLE".into()), ..access() };
        assert!(unset.headers().unwrap_err().contains("FOREBAY_NO_SUCH_VARIABLE"));
        assert!(access().headers().unwrap().is_empty());
    }

    #[test]
    fn headers_are_read_or_refused_without_their_value() {
        let (name, value) = header("X-Team:  blue: 1 ").unwrap();
        assert_eq!((name.as_str(), value.as_bytes()), ("x-team", &b"blue: 1"[..]));
        assert!(header("secret").unwrap_err().contains("NAME: VALUE"));
        assert!(header("a b: secret").unwrap_err().contains("\"a b\""));
        let error = header("a: sec\nret").unwrap_err();
        assert!(error.contains("value of a") && !error.contains("sec"), "{error}");
    }
}
