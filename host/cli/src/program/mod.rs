//! The parts that training programs share: logging, standard output, signals, the results folder,
//! settings in a checkpoint, ranks of a group, the loss picture, and statistics of memory and
//! graphs.

pub mod exit;
pub mod log;
pub mod loss_svg;
pub(crate) mod marks;
pub mod ranks;
pub mod results;
pub mod screen;
pub mod settings;
pub mod signals;
pub mod stored_as;
pub mod usage;
