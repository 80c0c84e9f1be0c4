//! Each fabric of UCX as a transport of agents.

use super::card::Card;
use super::context::UcxContext;
use super::fabric::Fabric;
use super::pipe::Pipe;
use crate::tcp::Carrier;
use crate::transport::{Connected, Exchange, Rail, Reach, Transport, TransportError, TransportInfo};
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

    fn open(&self, devices: &[String]) -> Result<Box<dyn Rail>, TransportError> {
        Ok(Box::new(UcxContext::open(*self, devices)?))
    }
}

impl Rail for Arc<UcxContext> {
    fn connect(&self, exchange: &mut Exchange<'_>) -> Result<Connected, TransportError> {
        let (mut pipe, own) = Pipe::new(self)?;
        let answer = exchange(own.to_bytes())?;
        pipe.connect(&Card::parse(&answer, &own)?)?;
        let report = self.report(&pipe.lanes());
        Ok(Connected { carrier: Box::new(pipe), report })
    }

    fn accept(&self, offer: &[u8]) -> Result<(Box<dyn Carrier>, Vec<u8>), TransportError> {
        let (mut pipe, own) = Pipe::new(self)?;
        pipe.connect(&Card::parse(offer, &own)?)?;
        Ok((Box::new(pipe), own.to_bytes()))
    }
}
