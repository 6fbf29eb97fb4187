//! A training run of a language model: the parts that `train` and `finetune` share.
//!
//! | file | part |
//! |---|---|
//! | [`best`] | the weights of the best evaluation |
//! | [`cli`] | options |
//! | [`events`] | the records of TensorBoard files |
//! | [`folder`] | tokenizer, chat template and stop tokens next to a model's weights |
//! | [`gpu`] | the clock and the temperature of the GPU |
//! | [`logs`] | JSON lines and TensorBoard files |
//! | [`memory`] | the size of the arena |
//! | [`program`] | exit codes, signals, the results folder, and ranks |
//! | [`report`] | `report.json` and `loss.svg` |
//! | [`settings`] | the settings of a model that a run must share to resume |
//! | [`updates`] | the loop of updates, with evaluations and checkpoints |

pub(crate) mod best;
pub(crate) mod cli;
pub(crate) mod events;
pub(crate) mod folder;
pub(crate) mod gpu;
pub(crate) mod logs;
pub(crate) mod memory;
pub(crate) mod program;
pub(crate) mod report;
pub(crate) mod settings;
pub(crate) mod updates;
