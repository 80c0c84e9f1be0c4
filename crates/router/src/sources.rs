//! Sources of engines that are read again and again while the router runs: a file, and DNS names
//! that stand for several addresses; `kubernetes` has another one. It knows how they are read; what
//! has to change is `membership`'s business.

use crate::config::Backend;
use crate::engines::{AddError, Engines};
use crate::event_address::EventAddress;
use crate::membership::{Source, Step};
use http::Uri;
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Between two readings of a file.
const READ_EVERY: Duration = Duration::from_secs(1);
/// Between two questions for a name, and for the answer to one.
const ASK_EVERY: Duration = Duration::from_secs(5);

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a file is no list of engines.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{path}: {error}")]
    Io { path: PathBuf, error: io::Error },
    #[error("{path} has more than the {FILE_BYTES_MAX} bytes that are allowed")]
    TooLong { path: PathBuf },
    #[error("{path}: {message}")]
    Toml { path: PathBuf, message: String },
    #[error("{path}: {error}")]
    Engine { path: PathBuf, error: crate::config::ConfigError },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenList {
    #[serde(default)]
    engines: Vec<WrittenEngine>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEngine {
    name: String,
    url: String,
    store: Option<String>,
    #[serde(default)]
    events: Vec<EventAddress>,
}

/// The engines that a file lists.
pub fn read_file(path: &Path) -> Result<Vec<Backend>, FileError> {
    let path_buf = || path.to_path_buf();
    let io = |error| FileError::Io { path: path_buf(), error };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(io)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(FileError::TooLong { path: path_buf() });
    }
    let list: WrittenList = toml::from_str(&text)
        .map_err(|error| FileError::Toml { path: path_buf(), message: error.to_string() })?;
    let backends = list.engines.into_iter();
    let backend = |WrittenEngine { name, url, store, events }| Backend { name, url, store, events };
    let backends: Vec<Backend> = backends.map(backend).collect();
    crate::config::check_backends(&backends)
        .map_err(|error| FileError::Engine { path: path_buf(), error })?;
    Ok(backends)
}

/// Keeps the engines as a file lists them, for ever. A file that cannot be read changes nothing.
pub async fn watch_file(engines: Arc<Engines>, path: PathBuf) {
    let mut keeper = Keeper::new(engines);
    loop {
        let read_path = path.clone();
        // A file may be on a disk of another host, and clients must not wait for that.
        match tokio::task::spawn_blocking(move || read_file(&read_path)).await {
            Ok(Ok(wanted)) => keeper.read(wanted),
            Ok(Err(error)) => keeper.lines.tell("", error.to_string(), |reason| {
                tracing::warn!(reason, "list of engines cannot be read");
            }),
            // The router ends.
            Err(_) => return,
        }
        tokio::time::sleep(READ_EVERY).await;
    }
}

/// Keeps an engine for each address that a name stands for, for ever. A name that cannot be
/// resolved changes nothing.
pub async fn watch_name(engines: Arc<Engines>, named: Backend) {
    let mut keeper = Keeper::new(engines);
    loop {
        match resolve(&named).await {
            Ok(wanted) => keeper.read(wanted),
            Err(error) => keeper.lines.tell("", error.to_string(), |reason| {
                tracing::warn!(engine = named.name, reason, "name of engines cannot be resolved");
            }),
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

async fn resolve(named: &Backend) -> io::Result<Vec<Backend>> {
    let uri: Uri = named.url.parse().map_err(io::Error::other)?;
    let authority = uri.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    let host = uri.host().unwrap_or_default();
    let found = tokio::time::timeout(ASK_EVERY, tokio::net::lookup_host(authority)).await??;
    let found: BTreeSet<SocketAddr> = found.collect();
    Ok(found.into_iter().map(|address| at(named, host, address)).collect())
}

/// The engine at one of a name's addresses, with a name of its own.
fn at(named: &Backend, host: &str, address: SocketAddr) -> Backend {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => ip.to_string().replace(':', "-"),
    };
    Backend {
        name: format!("{}-{ip}", named.name),
        url: format!("http://{address}"),
        store: named.store.clone(),
        events: named.events.iter().map(|events| events.at(host, address.ip())).collect(),
    }
}

/// Makes the engines what a source wants. It removes only what it added itself: what has the name
/// otherwise is another source's.
pub struct Keeper {
    engines: Arc<Engines>,
    source: Source,
    /// The ids of the engines that are there because of this source, by name.
    own: HashMap<String, u64>,
    pub lines: Said,
}

impl Keeper {
    pub fn new(engines: Arc<Engines>) -> Keeper {
        Keeper { engines, source: Source::default(), own: HashMap::new(), lines: Said::default() }
    }

    fn read(&mut self, wanted: Vec<Backend>) {
        self.lines.forget("");
        let steps = self.source.read(wanted);
        self.take(steps);
    }

    /// Takes in what cannot be half of a list. It may come again: what could not be done is tried.
    pub fn set(&mut self, wanted: Vec<Backend>) {
        let steps = self.source.set(wanted);
        self.take(steps);
    }

    fn take(&mut self, steps: Vec<Step>) {
        for step in steps {
            match &step {
                Step::Remove(name) => {
                    if let Some(id) = self.own.remove(name) {
                        self.engines.remove_id(id);
                    }
                    self.source.done(step);
                }
                Step::Add(backend) => match self.add(backend) {
                    Ok(()) => self.source.done(step),
                    Err(error) => self.lines.tell(&backend.name, error.to_string(), |reason| {
                        tracing::warn!(engine = backend.name, reason, "engine cannot be added");
                    }),
                },
            }
        }
    }

    fn add(&mut self, backend: &Backend) -> Result<(), AddError> {
        if let Some(id) = self.engines.add_backend(backend)? {
            self.own.insert(backend.name.clone(), id);
        }
        Ok(())
    }
}

/// What the log was told last of each thing, so that it is told once.
#[derive(Default)]
pub struct Said(HashMap<String, String>);

impl Said {
    pub fn tell(&mut self, of: &str, reason: String, tell: impl FnOnce(&str)) {
        if self.0.get(of) != Some(&reason) {
            tell(&reason);
            self.0.insert(of.to_owned(), reason);
        }
    }

    pub fn forget(&mut self, of: &str) {
        self.0.remove(of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_lists_engines_and_mistakes_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engines.toml");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_file(&path).map_err(|error| error.to_string().replace(path.to_str().unwrap(), "FILE"))
        };
        let two = "[[engines]]\nname = \"a\"\nurl = \"http://h:1\"\nstore = \"s\"\n\
                   [[engines]]\nname = \"b\"\nurl = \"http://h:2\"\n";
        let a = Backend { store: Some("s".into()), ..Backend::new("a", "http://h:1") };
        assert_eq!(read(two), Ok(vec![a, Backend::new("b", "http://h:2")]));
        assert_eq!(read(""), Ok(Vec::new()));
        let twice = two.replace("\"b\"", "\"a\"");
        assert_eq!(read(&twice), Err("FILE: backend name 'a' is given twice".into()));
        let bad_url = two.replace("http://h:2", "h:2");
        assert!(read(&bad_url).unwrap_err().starts_with("FILE: backend b: 'h:2' is not of the form"));
        assert!(read("[[engines]]\nname = \"a\"\n").unwrap_err().contains("url"));
        assert!(read("engine = 1").unwrap_err().contains("engine"));
        assert!(read(&"#".repeat(2 << 20)).unwrap_err().contains("1048576 bytes"));
        std::fs::remove_file(&path).unwrap();
        assert!(read_file(&path).unwrap_err().to_string().contains("engines.toml"));
    }

    #[test]
    fn a_source_removes_what_it_added_and_not_what_has_its_name() {
        let engines = crate::engines::tests::engines();
        let backends = |names: &[&str]| -> Vec<Backend> {
            names.iter().map(|name| Backend::new(*name, format!("http://{name}:1"))).collect()
        };
        let names =
            || -> Vec<String> { engines.all().iter().map(|engine| engine.name().to_owned()).collect() };
        let (mut file, mut dns) = (Keeper::new(engines.clone()), Keeper::new(engines.clone()));
        let settle = |keeper: &mut Keeper, wanted: &[&str]| {
            (0..2).for_each(|_| keeper.read(backends(wanted)));
            names()
        };
        assert_eq!(settle(&mut file, &["a", "b"]), ["a", "b"]);
        assert_eq!(settle(&mut dns, &["b", "c"]), ["a", "b", "c"]);
        assert_eq!(settle(&mut dns, &[]), ["a", "b"], "b is the file's");
        engines.remove("a").unwrap();
        engines.add_backend(&backends(&["a"])[0]).unwrap();
        assert_eq!(settle(&mut file, &[]), ["a"], "somebody else's a");
    }

    #[test]
    fn each_address_of_a_name_is_an_engine_with_a_name_and_a_url() {
        let named = Backend { store: Some("s".into()), ..Backend::new("pods", "http://pods.example:8000") };
        let v4 = at(&named, "pods.example", "10.0.0.7:8000".parse().unwrap());
        assert_eq!((&v4.name[..], &v4.url[..]), ("pods-10.0.0.7", "http://10.0.0.7:8000"));
        let v6 = at(&named, "pods.example", "[2001:db8::7]:8000".parse().unwrap());
        assert_eq!((&v6.name[..], &v6.url[..]), ("pods-2001-db8--7", "http://[2001:db8::7]:8000"));
        assert!(crate::config::check_backends(&[v4, v6]).is_ok());
    }
}
