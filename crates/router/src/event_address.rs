//! Where an engine publishes its KV events: as options, files and the admin API have it, and
//! checked.

use http::uri::Authority;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::str::FromStr;

/// Where one data-parallel rank publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventAddress {
    /// Its PUB socket: `tcp://HOST:PORT`.
    pub publish: String,
    /// The ROUTER socket at which missed events are asked for, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventAddressError {
    #[error("'{0}' is not of the form tcp://HOST:PORT[,replay=tcp://HOST:PORT]")]
    Form(String),
    #[error("'{0}' is not of the form tcp://HOST:PORT")]
    Address(String),
}

/// The same, to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTarget {
    pub publish: String,
    pub replay: Option<String>,
}

impl FromStr for EventAddress {
    type Err = EventAddressError;

    fn from_str(text: &str) -> Result<EventAddress, EventAddressError> {
        let mut parts = text.split(',');
        let publish = parts.next().unwrap_or_default().to_owned();
        let replay = match parts.next().map(|part| part.strip_prefix("replay=")) {
            None => None,
            Some(Some(replay)) if parts.next().is_none() => Some(replay.to_owned()),
            Some(_) => return Err(EventAddressError::Form(text.to_owned())),
        };
        Ok(EventAddress { publish, replay })
    }
}

impl EventAddress {
    pub(crate) fn check(&self) -> Result<EventTarget, EventAddressError> {
        let replay = self.replay.as_deref().map(authority).transpose()?;
        Ok(EventTarget {
            publish: authority(&self.publish)?.to_string(),
            replay: replay.map(|at| at.to_string()),
        })
    }

    /// The same with an address instead of a host name, where it has that name.
    pub(crate) fn at(&self, host: &str, address: IpAddr) -> EventAddress {
        let at = |text: &String| match authority(text) {
            Ok(named) if named.host() == host => {
                let port = named.port_u16().unwrap_or_default();
                format!("tcp://{}", std::net::SocketAddr::new(address, port))
            }
            _ => text.clone(),
        };
        EventAddress { publish: at(&self.publish), replay: self.replay.as_ref().map(at) }
    }
}

impl EventTarget {
    pub fn to_address(&self) -> EventAddress {
        let address = |authority: &String| format!("tcp://{authority}");
        EventAddress { publish: address(&self.publish), replay: self.replay.as_ref().map(address) }
    }
}

fn authority(text: &str) -> Result<Authority, EventAddressError> {
    let authority = text.strip_prefix("tcp://").and_then(|rest| rest.parse::<Authority>().ok());
    let is_whole = |at: &Authority| {
        at.port_u16().is_some_and(|port| port > 0) && !at.as_str().contains('@') && at.host() != "*"
    };
    authority.filter(is_whole).ok_or_else(|| EventAddressError::Address(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_tcp_a_host_and_a_port_and_mistakes_are_named() {
        let checked = |text: &str| {
            let checked = text.parse::<EventAddress>().and_then(|address| address.check());
            checked.map(|at| (at.publish, at.replay)).map_err(|error| error.to_string())
        };
        assert_eq!(checked("tcp://h:1"), Ok(("h:1".into(), None)));
        assert_eq!(checked("tcp://[::1]:1,replay=tcp://g:2"), Ok(("[::1]:1".into(), Some("g:2".into()))));
        for bad in ["h:1", "tcp://h", "tcp://h:0", "tcp://*:5557", "ipc://h:1", "tcp://u@h:1", ""] {
            assert_eq!(checked(bad), Err(format!("'{bad}' is not of the form tcp://HOST:PORT")));
        }
        assert!(checked("tcp://h:1,tcp://h:2").unwrap_err().contains("replay="));
        assert!(checked("tcp://h:1,replay=tcp://h:2,").unwrap_err().contains("replay="));
        assert_eq!(checked("tcp://h:1,replay=x"), Err("'x' is not of the form tcp://HOST:PORT".into()));
    }

    #[test]
    fn the_host_name_of_several_engines_becomes_the_address_of_each() {
        let named: EventAddress = "tcp://pods:1,replay=tcp://other:2".parse().unwrap();
        let at = named.at("pods", "2001:db8::7".parse().unwrap());
        assert_eq!(at, "tcp://[2001:db8::7]:1,replay=tcp://other:2".parse().unwrap());
    }
}
