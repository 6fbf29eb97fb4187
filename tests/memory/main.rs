//! Tests of the arena, tensors, buffers, uploads and memory reports.

#[path = "../support/overrun.rs"]
mod overrun;
#[path = "../support/mod.rs"]
mod support;

mod alignment;
mod arena;
mod arrays;
mod bounds;
mod checked;
mod diagnostics;
mod dlpack;
mod empty_tensors;
mod host_limits;
mod inside;
mod memory_floor;
mod memory_model;
mod overflow;
mod parameter_spec;
mod recompute;
mod step_hazards;
mod tensors;
mod upload;
