//! The program `stepscope`: one module for each subcommand, and [`program`], which training
//! programs share.
//!
//! ```text
//! stepscope train      trains a language model on text and prints a sample
//! stepscope finetune   fine-tunes a language model of transformers on chats
//! stepscope generate   continues a text, or answers, with the weights of a folder
//! stepscope doctor     examines a machine before a run
//! stepscope predict    predicts the time of a step on a GPU that is not present
//! stepscope check      compares the results of every kernel with the committed ones
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod check;
#[path = "../../../examples/crossasset/model.rs"]
#[allow(dead_code, reason = "the monitored weight is not used here")]
mod crossasset;
mod doctor;
mod finetune;
mod generate;
mod predict;
pub mod program;
mod run;
#[path = "../../../examples/crossasset/sizes.rs"]
mod sizes;
#[cfg(test)]
#[path = "../../../tests/support/mod.rs"]
mod support;
mod train;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Trains models with the same bits on every device, and checks what that takes
#[derive(Parser)]
#[command(name = "stepscope", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(Box<train::cli::Args>),
    Finetune(Box<finetune::cli::Args>),
    Generate(generate::Args),
    Doctor(doctor::Args),
    Predict(Box<predict::Args>),
    Check(check::Args),
}

/// Runs the subcommand of the command line, in the default floating-point mode. A library that the
/// process loads may have set another one. Threads inherit the mode.
pub fn main() -> ExitCode {
    cuda_std::float_mode::set_default();
    match Arguments::parse().command {
        Command::Train(args) => train::main(&args),
        Command::Finetune(args) => finetune::main(&args),
        Command::Generate(args) => generate::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Predict(args) => predict::main(&args),
        Command::Check(args) => check::main(&args),
    }
}
