//! Parts that the training examples share: log, screen, signals, the folder of results, settings in
//! a checkpoint, ranks of a group, the picture of the loss, and figures of the memory and the
//! graphs that were used.

#![allow(dead_code, reason = "each example uses its part")]

pub(crate) mod exit;
pub(crate) mod log;
pub(crate) mod loss_svg;
pub(crate) mod ranks;
pub(crate) mod results;
pub(crate) mod screen;
pub(crate) mod settings;
pub(crate) mod signals;
pub(crate) mod stored_as;
pub(crate) mod usage;
