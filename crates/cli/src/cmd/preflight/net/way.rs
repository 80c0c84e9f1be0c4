//! The way from this host to an address, as the kernel would take it: which device, over which
//! gateway, from which address. Knows netlink, and nothing of what is good or bad.

use forebay_cuda::topology::Root;
use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, Parseable,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::IpAddr;

/// A way to one address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    pub device: String,
    pub gateway: Option<IpAddr>,
    /// The address that packets carry as their source.
    pub source: Option<IpAddr>,
    /// Bytes of a packet on the device.
    pub mtu: Option<u32>,
    /// What the device says that its link carries, in Mbit/s.
    pub mbit_per_s: Option<u32>,
}

/// An address of this host, and the device that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    pub address: IpAddr,
    pub device: String,
}

impl Way {
    /// The way to an address, or why there is none.
    pub fn to(address: IpAddr, root: &Root) -> io::Result<Way> {
        let mut route = RouteMessage::default();
        let (family, bits) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        (route.header.address_family, route.header.destination_prefix_length) = (family, bits);
        route.attributes.push(RouteAttribute::Destination(address.into()));
        let mut way = Way::default();
        for route in ask(libc::RTM_GETROUTE, route, NLM_F_REQUEST)? {
            route.attributes.into_iter().try_for_each(|attribute| way.take(attribute))?;
        }
        way.read_link(root);
        Ok(way)
    }

    fn take(&mut self, attribute: RouteAttribute) -> io::Result<()> {
        match attribute {
            RouteAttribute::Oif(index) => self.device = device_name(index)?,
            RouteAttribute::Gateway(gateway) => self.gateway = ip_of(&gateway),
            RouteAttribute::PrefSource(source) => self.source = ip_of(&source),
            _ => {}
        }
        Ok(())
    }

    /// What the device says of itself. `-1`, or no answer, is what virtual ones say of their speed.
    fn read_link(&mut self, root: &Root) {
        let number = |file: &str| root.text(&format!("sys/class/net/{}/{file}", self.device))?.parse().ok();
        let (mtu, speed) = (number("mtu"), number("speed"));
        (self.mtu, self.mbit_per_s) = (mtu, speed.filter(|speed| *speed > 0));
    }
}

/// The addresses of this host.
pub fn local_addresses() -> io::Result<Vec<LocalAddress>> {
    let mut found = Vec::new();
    for message in ask(libc::RTM_GETADDR, AddressMessage::default(), NLM_F_REQUEST | NLM_F_DUMP)? {
        let device = device_name(message.header.index)?;
        let address =
            |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
        // Of a tunnel, the one is the other end's.
        let local = |attribute: &AddressAttribute| match attribute {
            AddressAttribute::Local(address) => Some(*address),
            _ => None,
        };
        let own = |attribute: &AddressAttribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        };
        found.extend(address(local).or(address(own)).map(|address| LocalAddress { address, device }));
    }
    Ok(found)
}

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}

fn device_name(index: u32) -> io::Result<String> {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(netdevice::index_to_name(any, index)?)
}

/// A message of a kind that is known from the question. The library can read every kind, with which
/// this program would be half a megabyte longer.
struct Message<M> {
    kind: u16,
    body: M,
}

impl<M: Emitable> NetlinkSerializable for Message<M> {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.body.buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        self.body.emit(buffer);
    }
}

impl<M: Parseable<[u8]>> NetlinkDeserializable for Message<M> {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Message<M>, DecodeError> {
        Ok(Message { kind: header.message_type, body: M::parse(payload)? })
    }
}

/// Asks the kernel, and takes all of its answer.
fn ask<M: Emitable + Parseable<[u8]>>(kind: u16, body: M, flags: u16) -> io::Result<Vec<M>> {
    let bad = |error: DecodeError| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let payload = NetlinkPayload::InnerMessage(Message { kind, body });
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), payload);
    message.header.flags = flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut answers = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let message = NetlinkMessage::<Message<M>>::deserialize(rest).map_err(bad)?;
            let length = (message.header.length as usize).next_multiple_of(4).min(rest.len());
            rest = &rest[length..];
            match message.payload {
                NetlinkPayload::InnerMessage(answer) => answers.push(answer.body),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::Done(_) => return Ok(answers),
                _ => {}
            }
            if flags & NLM_F_DUMP != NLM_F_DUMP {
                return Ok(answers);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_this_host_is_its_loopback() {
        let way = Way::to("127.0.0.1".parse().unwrap(), &Root::default()).unwrap();
        assert_eq!((&*way.device, way.gateway), ("lo", None));
        assert!(way.mtu.is_some_and(|mtu| mtu >= 1500), "{way:?}");
        let local = local_addresses().unwrap();
        assert!(local.contains(&LocalAddress { address: "127.0.0.1".parse().unwrap(), device: "lo".into() }));
    }

    #[test]
    fn a_link_that_does_not_know_its_speed_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("sys/class/net/eth0");
        std::fs::create_dir_all(&device).unwrap();
        for (file, text) in [("mtu", "9000\n"), ("speed", "-1\n")] {
            std::fs::write(device.join(file), text).unwrap();
        }
        let mut way = Way { device: "eth0".into(), ..Way::default() };
        way.read_link(&Root::new(folder.path()));
        assert_eq!((way.mtu, way.mbit_per_s), (Some(9000), None));
        std::fs::write(device.join("speed"), "25000\n").unwrap();
        way.read_link(&Root::new(folder.path()));
        assert_eq!(way.mbit_per_s, Some(25_000));
    }
}
