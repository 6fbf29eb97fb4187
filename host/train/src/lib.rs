//! Training: layers, optimizers, the trainer, loaders, checkpoints and files of weights.
//!
//! Invariant: updates go through [`Optimizer`], and every file is opened through `PlainFile`.

#![deny(unsafe_op_in_unsafe_fn)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod checkpoint;
mod file_type;
mod loader;
pub mod nn;
mod optim;
mod pretrained;
mod run_lock;
mod state_dict;
mod tensor_files;
mod tensor_writer;
mod tensors;
mod token_sampler;
mod trainer;
mod windows;

pub use checkpoint::Checkpoint;
pub use file_type::FileType;
pub use loader::Loader;
pub use optim::{
    AdamW, Decay, Muon, Optimizer, ParameterGroup, ParameterGroups, Schedule, Sgd, SmallUpdateArguments,
    UpdateArguments, UpdateRule, UpdateTicket, WholeParameter,
};
pub use pretrained::StateDict;
pub use run_lock::RunLock;
pub use state_dict::{load_state_dict, save_state_dict, save_state_dict_as};
/// Implements [`HostBatch`] for a struct of [`HostArray`]s.
pub use stepscope_train_macros::HostBatch;
pub use tensor_files::TensorFiles;
pub use tensor_writer::{NewTensor, save_tensors};
pub use token_sampler::{TokenSampler, TokenSamplerConfig, penalize_repetition};
#[cfg(feature = "progress")]
pub use trainer::ProgressBar;
pub use trainer::{
    Ended, EpochProgress, HostArray, HostBatch, IntoBatch, MOST_FIGURES, Model, Observer, Sample, StepMemory,
    TrainState, Trainer, Update,
};
pub use windows::Windows;
