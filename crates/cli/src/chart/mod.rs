//! Charts as self-contained SVG files that read in light and in dark surroundings.
//!
//! Written out here rather than by a plotting crate (`plotters` was the candidate): those fix colors at
//! drawing time, so one file cannot follow the reader's light or dark theme, and their text cannot be
//! placed beside the points it names. Two kinds of charts need no more than this.

mod frame;
mod scale;
mod scatter;
mod stack;

pub use frame::Axis;
pub use scale::Scale;
pub use scatter::{Point, Scatter, Series};
pub use stack::{Layer, Mark, Stack};
