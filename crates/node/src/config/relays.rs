//! What a node is told of the GPUs that relay for engines, and which values are allowed. Which GPUs
//! there are shows when the node starts.

use super::{ConfigError, is_same, size_in, socket_path};
use crate::size;
use forebay_cuda::remote::{self, Uuid};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::path::{Path, PathBuf};

/// GPUs that relay for engines of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelaysConfig {
    pub socket: PathBuf,
    #[serde(default)]
    pub gpus: RelayGpus,
    /// Host memory that one engine may have the node map and pin.
    #[serde(default = "tebibyte", with = "size")]
    pub memory: u64,
}

/// GPUs, by what names them in every process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RelayGpus {
    /// By UUID, as `nvidia-smi -L` lists them.
    These(Vec<String>),
    /// Every one that the node sees.
    #[default]
    All,
}

/// As it is written: the word `all`, or a list.
impl Serialize for RelayGpus {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            RelayGpus::These(uuids) => uuids.serialize(to),
            RelayGpus::All => to.serialize_str("all"),
        }
    }
}

impl<'de> Deserialize<'de> for RelayGpus {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<RelayGpus, D::Error> {
        from.deserialize_any(Written)
    }
}

struct Written;

impl<'de> de::Visitor<'de> for Written {
    type Value = RelayGpus;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("'all' or a list of UUIDs")
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<RelayGpus, E> {
        match word {
            "all" => Ok(RelayGpus::All),
            other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
        }
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<RelayGpus, A::Error> {
        Vec::deserialize(de::value::SeqAccessDeserializer::new(list)).map(RelayGpus::These)
    }
}

impl RelaysConfig {
    /// All GPUs, for engines that attach at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> RelaysConfig {
        RelaysConfig { socket: socket.into(), gpus: RelayGpus::All, memory: tebibyte() }
    }

    pub(super) fn check(&self, socket: &Path) -> Result<(), ConfigError> {
        socket_path("relays.socket", &self.socket)?;
        if is_same(socket, &self.socket) {
            let path = format!("{:?}", self.socket);
            return Err(ConfigError::value("relays.socket", path, "another path than socket's"));
        }
        size_in("relays.memory", self.memory, 2 << 20, 1 << 50)?;
        self.uuids().map(drop)
    }

    fn uuids(&self) -> Result<Option<Vec<Uuid>>, ConfigError> {
        let RelayGpus::These(texts) = &self.gpus else { return Ok(None) };
        let allowed =
            "'all' or a list of UUIDs, each once, such as 'GPU-5c2f0d5e-6b0a-4f3c-9d7e-1a2b3c4d5e6f'";
        let wrong = |value: &str| ConfigError::value("relays.gpus", value, allowed);
        let mut uuids: Vec<Uuid> = Vec::with_capacity(texts.len());
        for text in texts {
            let digits = text.strip_prefix("GPU-").unwrap_or(text).replace('-', "");
            match Uuid::try_from(digits) {
                Ok(uuid) if !uuids.contains(&uuid) => uuids.push(uuid),
                _ => return Err(wrong(text)),
            }
        }
        if uuids.is_empty() { Err(wrong("an empty list")) } else { Ok(Some(uuids)) }
    }

    /// As relays are told, with what clients of the node have to show.
    pub(crate) fn for_relays(&self, token: &[u8], uids: &[u32]) -> Result<remote::RelaysConfig, ConfigError> {
        Ok(remote::RelaysConfig {
            socket: self.socket.clone(),
            gpus: self.uuids()?,
            token: token.to_vec(),
            uids: uids.to_vec(),
            memory_limit_bytes: self.memory,
        })
    }
}

fn tebibyte() -> u64 {
    1 << 40
}

#[cfg(test)]
mod tests {
    use super::super::NodeConfig;
    use super::*;

    fn relays(lines: &str) -> Result<Option<RelaysConfig>, ConfigError> {
        let text = format!("socket = 'n.sock'\n[memory]\nsize = '64MiB'\n{lines}");
        NodeConfig::from_toml(&text).map(|config| config.relays)
    }

    #[test]
    fn relays_are_off_unless_asked_for_and_then_use_all_gpus() {
        assert_eq!(relays("").unwrap(), None);
        let asked = relays("[relays]\nsocket = 'r.sock'\n").unwrap();
        assert_eq!(asked, Some(RelaysConfig::new("r.sock")));
        assert_eq!(relays("[relays]\nsocket = 'r.sock'\ngpus = 'all'\n").unwrap(), asked);
    }

    #[test]
    fn gpus_are_named_as_their_tools_name_them() {
        let asked = "[relays]\nsocket = 'r'\n\
                     gpus = ['GPU-00112233-4455-6677-8899-aabbccddeeff', '0123456789abcdef0123456789abcdef']";
        let relays = relays(asked).unwrap().unwrap();
        let uuids = relays.uuids().unwrap().unwrap();
        assert_eq!(uuids[0].to_string(), "00112233445566778899aabbccddeeff");
        assert_eq!(uuids.len(), 2);
    }

    #[test]
    fn what_names_no_gpu_is_refused_with_what_is_allowed() {
        for gpus in ["[]", "['0']", "['GPU-0011']", "'some'", "0"] {
            let error = relays(&format!("[relays]\nsocket = 'r'\ngpus = {gpus}\n")).unwrap_err().to_string();
            assert!(error.contains("gpus") && error.contains("'all' or a list of UUIDs"), "{gpus}: {error}");
        }
        let twice = "00112233445566778899aabbccddeeff";
        let twice = relays(&format!("[relays]\nsocket = 'r'\ngpus = ['{twice}', 'GPU-{twice}']\n"));
        assert!(twice.unwrap_err().to_string().contains("each once"));
        let memory = relays("[relays]\nsocket = 'r'\nmemory = '1KiB'\n").unwrap_err().to_string();
        assert!(memory.contains("relays.memory is 1KiB"), "{memory}");
    }

    #[test]
    fn what_is_printed_is_what_was_read() {
        for gpus in ["'all'", "['00112233445566778899aabbccddeeff']"] {
            let text =
                format!("socket = 'n'\n[memory]\nsize = '64MiB'\n[relays]\nsocket = 'r'\ngpus = {gpus}\n");
            let config = NodeConfig::from_toml(&text).unwrap();
            assert_eq!(NodeConfig::from_toml(&config.to_toml()).unwrap().relays, config.relays);
        }
    }
}
