//! The plots of the report, each a self-contained SVG drawn from plain numbers. The files below
//! know pictures.

mod cdf;
mod choices;
mod load;
mod moved;
mod scale;
mod scatter;
mod sources;
mod svg;

pub use cdf::{Distribution, distributions};
pub use choices::{Chosen, choices};
pub use load::{LoadPanel, Series, load};
pub use moved::{Moved, moved};
pub use scatter::{Predicted, scatter};
pub use sources::{Split, sources};
pub use svg::escape;
