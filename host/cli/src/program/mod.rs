//! The process of a training program, such as `stepscope train` or the example `crossasset`.
//!
//! | file | part |
//! |---|---|
//! | [`exit`] | exit codes |
//! | [`log`] | the log on standard error |
//! | `marks` | the files of a run, and the marks by which they are recognized |
//! | [`ranks`] | the ranks of a group that this process runs |
//! | [`results`] | the folder of a run's results |
//! | [`screen`] | standard output |
//! | [`settings`] | the settings in a checkpoint |
//! | [`signals`] | Ctrl-C, SIGTERM and SIGHUP |
//! | [`stored_as`] | the element type in memory, as an option |
//! | [`usage`] | the report's sections about the model, the memory and the graphs |
//! | `workers` | threads for work on many items |

pub mod exit;
pub mod log;
pub(crate) mod marks;
pub mod ranks;
pub mod results;
pub mod screen;
pub mod settings;
pub mod signals;
pub mod stored_as;
pub mod usage;
pub(crate) mod workers;
