//! The checks, one file each: what is looked at, and a pure judgement over it. Those of pairs of
//! hosts are in `rates`.

pub mod clocks;
pub mod dns;
pub mod limits;
pub mod mtu;
pub mod numa;
pub mod ports;
pub mod rates;
pub mod rdma;
pub mod route;
pub mod transports;
pub mod versions;
