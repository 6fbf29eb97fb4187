//! Code shared by the training examples: logging, standard output, signals, the results folder,
//! settings in a checkpoint, ranks of a group, the loss picture, and statistics of memory and
//! graphs.

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
