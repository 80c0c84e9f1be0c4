//! Links on GPUs: host memory and a GPU joined by its own PCIe lane, and by the lanes of its peers over NVLink.
//!
//! A `Copier` is a mover with those links and routes. It never decides what moves when, which is the mover's; it knows
//! devices, streams and kernels, which nothing else in the house may know.

pub mod device;
pub mod driver;
pub mod gpu;
pub mod pinned;
pub mod topology;
