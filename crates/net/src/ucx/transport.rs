//! Each fabric of UCX as a transport of agents.

use super::connection::UcxConnection;
use super::context::UcxContext;
use super::endpoint_description::EndpointDescription;
use super::fabric::Fabric;
use crate::tcp::Carrier;
use crate::transport::{Connected, Exchange, OpenTransport, Reach, Transport, TransportError, TransportInfo};
use std::sync::Arc;

impl Transport for Fabric {
    fn info(&self) -> TransportInfo {
        let (name, path, rank, reach) = match self {
            Fabric::Memory => ("memory", "ucx_memory", 0, Reach::Host),
            Fabric::Rdma => ("rdma", "ucx_rdma", 1, Reach::Network),
            Fabric::Tcp => ("tcp", "ucx_tcp", 2, Reach::Network),
        };
        TransportInfo { name, path, code: self.code() as u8, rank, reach }
    }

    fn open(&self, devices: &[String]) -> Result<Box<dyn OpenTransport>, TransportError> {
        Ok(Box::new(UcxContext::open(*self, devices)?))
    }
}

impl OpenTransport for Arc<UcxContext> {
    fn connect(&self, exchange: &mut Exchange<'_>) -> Result<Connected, TransportError> {
        let (mut connection, own) = UcxConnection::new(self)?;
        let answer = exchange(own.to_bytes())?;
        connection.connect(&EndpointDescription::parse(&answer, &own)?)?;
        let report = self.report(&connection.lanes());
        Ok(Connected { carrier: Box::new(connection), report })
    }

    fn accept(&self, offer: &[u8]) -> Result<(Box<dyn Carrier>, Vec<u8>), TransportError> {
        let (mut connection, own) = UcxConnection::new(self)?;
        connection.connect(&EndpointDescription::parse(offer, &own)?)?;
        Ok((Box::new(connection), own.to_bytes()))
    }
}
