//! The sizes of a sample, shared by the data code and the model.

/// Bars per aggregate of each scale.
pub(crate) const SCALES: [usize; 12] = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233];
/// Aggregates of each scale.
pub(crate) const AGGREGATES: usize = 32;
/// Numbers per aggregate.
pub(crate) const FIELDS: usize = 6;
/// Numbers per scale.
pub(crate) const FEATURES: usize = AGGREGATES * FIELDS + 1;
/// Down, flat and up.
pub(crate) const CLASSES: usize = 3;
