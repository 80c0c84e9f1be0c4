//! The plots of the report, each a self-contained SVG drawn from plain numbers. The files below
//! know pictures.

mod cdf;
mod choices;
mod moved;
mod over_time;
mod scale;
mod scatter;
mod sources;
mod svg;

pub use cdf::{Distribution, distributions};
pub use choices::{Chosen, choices};
pub use moved::{Moved, moved};
pub use over_time::{Measure, Panel, Series, over_time};
pub use scatter::{Predicted, scatter};
pub use sources::{Split, sources};
pub use svg::escape;
