//! Tests of layers, optimizers, trainers, checkpoints and weight files.

#[path = "../support/overrun.rs"]
mod overrun;
#[path = "../support/mod.rs"]
mod support;

mod adapters;
mod attention;
mod batch_invariant;
mod bf16;
mod checkpoint;
mod evaluation;
mod files;
mod finite_settings;
mod float_mode;
mod frozen;
mod muon;
mod nn;
mod params;
mod released;
mod run_lock;
mod small_memory;
mod state_dict;
mod trainer;
mod two_states;
mod update_rules;
