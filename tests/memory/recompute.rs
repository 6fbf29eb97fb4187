//! `Tape::recompute`: the bits are those without it, and a closure's memory is freed.
//!
//! | module | contents |
//! |---|---|
//! | `graphs` | models, each run with recomputing and without |
//! | `bits` | the same bits, whatever is kept or returned, wherever it runs |
//! | `memory` | the memory of a step, and that all of a closure's is freed |
//! | `refused` | closures that fail, panic, or differ in the second run |

#![forbid(unsafe_code)]

mod bits;
mod graphs;
mod memory;
mod refused;
