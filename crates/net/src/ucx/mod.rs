//! Transports over what libucp finds: shared memory, InfiniBand, RoCE and sockets. The library is
//! loaded at run time; where it is missing, everything else works and [`UcxContext::open`] says why
//! this does not.
//!
//! Pure parts: `endpoint_description` is what two ends tell each other first, `window` puts
//! messages in order, `report` reads what UCX prints, `timeout` is how long a wait lasts. Driver:
//! `sys` is the library's interface, `worker` its calls, `callbacks` its callbacks, `buffers` all
//! the memory that it sees, and `connection` a stream of bytes made of its messages. Glue:
//! `context`, and `transport`, which is what [`crate::transport`] asks for.

mod buffers;
mod callbacks;
mod connection;
mod context;
mod endpoint_description;
mod error;
mod fabric;
mod report;
mod sys;
#[cfg(test)]
mod tests;
mod timeout;
mod transport;
mod window;
mod worker;

pub use context::UcxContext;
pub use error::UcxError;
pub use fabric::Fabric;
