//! Links on GPUs: host memory and a GPU joined by its own PCIe lane, and by the lanes of its peers over NVLink.
//!
//! A [`Copier`] is a mover with those links and routes; [`chain::Chains`] copy in a caller's stream. Neither decides what
//! moves when, which is the mover's or the stream's; they know devices, streams and kernels, which nothing else in the
//! house may know.

mod addresses;
mod capi;
pub mod chain;
mod copier;
pub mod device;
pub mod driver;
pub mod gpu;
pub mod kernels;
pub mod links;
pub mod measure;
pub mod pinned;
pub mod poller;
pub mod preflight;
pub mod profile;
pub mod rates;
mod relay;
pub mod remote;
pub mod topology;

pub use addresses::{Addresses, NoAddress};
pub use copier::{Copier, CopierOptions, CopyError, HOST, SHARED, StartError};
pub use relay::{By, Relay};
