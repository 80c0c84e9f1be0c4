//! What a node is called where nothing was said: the host's name with a digest of the machine and
//! of the socket behind it, so that neither two machines that have one host name nor two nodes of
//! one machine have one name.

use super::ConfigError;
use crate::directory::{NAME_BYTES_MAX, check_name};
use serde::{Deserialize, Deserializer, de};
use std::path::Path;

/// Where systems keep what tells their machine from all others.
const MACHINE_IDS: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];

/// The same after each start, on this machine with this socket.
pub fn default(socket: &Path) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let machine = MACHINE_IDS.iter().find_map(|path| std::fs::read_to_string(path).ok());
    of(&host, machine.as_deref().unwrap_or_default().trim(), socket)
}

fn of(host: &str, machine: &str, socket: &Path) -> String {
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    let mut hasher = blake3::Hasher::new_derive_key("forebay node name from machine and socket, 1");
    for part in [host.as_bytes(), machine.as_bytes(), socket.as_os_str().as_encoded_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    let host: String = host.chars().filter(|letter| !letter.is_control()).take(63).collect();
    format!("{host}-{}", hex::encode(&hasher.finalize().as_bytes()[..4]))
}

/// For serde: a name that was given.
pub fn given<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check(&name).map_err(de::Error::custom)?;
    Ok(name)
}

pub fn check(name: &str) -> Result<(), ConfigError> {
    let allowed = || format!("1 to {NAME_BYTES_MAX} bytes without control characters");
    check_name(name).map_err(|_| ConfigError::value("name", format!("{name:?}"), allowed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_one_host_name_have_names_of_their_own_that_stay() {
        let (socket, other) = (Path::new("/run/a.sock"), Path::new("/run/b.sock"));
        let name = of("node", "m1", socket);
        assert!(name.starts_with("node-") && name.len() == 13, "{name}");
        assert_eq!(of("node", "m1", socket), name);
        assert_ne!(of("node", "m2", socket), name, "another machine");
        assert_ne!(of("node", "m1", other), name, "another node of this machine");
        assert!(check(&of(&"x".repeat(300), "", socket)).is_ok());
        assert_eq!(default(socket), default(socket));
    }
}
