//! Addresses as people write them, `10.0.0.1:7600`.

use serde::{Deserialize, Deserializer, de};
use std::net::SocketAddr;

/// For serde: an address, where there is one or may be one.
pub fn deserialize<'de, D: Deserializer<'de>, A: From<SocketAddr>>(from: D) -> Result<A, D::Error> {
    let text = String::deserialize(from)?;
    let address = text.parse().map_err(|_| {
        let allowed = "an IP address and a port, as 10.0.0.1:7600 or [::1]:7600";
        de::Error::custom(format!("'{text}' is no address; allowed is {allowed}"))
    });
    address.map(|address: SocketAddr| address.into())
}
