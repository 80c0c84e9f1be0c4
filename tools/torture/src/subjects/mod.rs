//! The stores that come with the suite. Each is a [`Subject`](crate::serve::Subject) in a process
//! of its own; what goes wrong below it is played by a file layer that lives here and not in the
//! store.

mod faulty_medium;
mod file_per_object;
mod files;
mod forebay;
pub mod lmcache;
mod memory;
mod node;

pub use file_per_object::FilePerObject;
pub use forebay::Forebay;
pub use node::Node;
