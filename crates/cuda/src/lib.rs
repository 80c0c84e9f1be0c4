//! Links on GPUs: host memory and a GPU joined by its own PCIe link, and by the PCIe links of its
//! peers over NVLink.
//!
//! A [`Copier`] is a mover with those links and paths; [`stream_copy::StreamCopies`] copy in a
//! caller's stream. Neither decides what moves when, which is the mover's or the stream's; they
//! know devices, streams and kernels, which nothing else in the house may know.
//!
//! ```no_run
//! use forebay_cuda::device::{DeviceMemory, HostMemory, Stream};
//! use forebay_cuda::kernels::Piece;
//! use forebay_cuda::links::Direction;
//! use forebay_cuda::{Copier, CopierOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let bytes = 64 << 20;
//! let copier = Copier::start(&CopierOptions::default())?;
//! let gpu = copier.devices().next().ok_or("no GPU")?;
//! let (host, memory) = (HostMemory::new(gpu, bytes)?, DeviceMemory::new(gpu, bytes as u64)?);
//! let there = [Piece { from: host.start() as u64, to: memory.address(), bytes: bytes as u64 }];
//!
//! // SAFETY: both ranges are valid, the host's is pinned, and nobody else uses them.
//! unsafe { copier.copy_and_wait(gpu.index(), Direction::HostToDevice, &there)? };
//!
//! // The same in the order of a stream, whose context is current.
//! let stream = Stream::new(gpu)?;
//! let _current = gpu.enter()?;
//! // SAFETY: as above; both outlive the stream's work.
//! if let Some(declined) = unsafe { copier.copy_in_stream(&there, stream.handle())? } {
//!     println!("it went direct: {declined}");
//! }
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```

mod access;
mod addresses;
mod capi;
pub mod checksum;
pub mod commits;
mod copier;
pub mod device;
pub mod driver;
mod estimates;
pub mod event_waiter;
pub mod gpu;
pub mod ipc;
pub mod ipc_memory;
pub mod kernels;
pub mod links;
pub mod measure;
mod open;
pub mod peers;
pub mod pinned;
pub mod places;
pub mod plan;
pub mod poller;
pub mod preflight;
pub mod profile;
mod quarantine;
pub mod rates;
mod relay;
pub mod remote;
pub mod stream_copy;
pub mod topology;

pub use addresses::{Addresses, NoAddress};
pub use copier::{Copier, CopierOptions, CopyError, StartError, pays_to_relay, start_stream_copies};
pub use links::{HOST, SHARED};
pub use open::LeftOut;
pub use relay::{By, Relay};
