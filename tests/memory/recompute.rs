//! Checkpoints of a tape: the bits are those without them, and nothing of a closure is left.
//!
//! | module | what |
//! |---|---|
//! | `graphs` | models, each run with checkpoints and without |
//! | `bits` | the same bits: whatever is kept or returned, wherever it runs |
//! | `memory` | what a step takes, and that all of a closure's goes back |
//! | `refused` | closures that fail, panic, or do something else the second time |

#![forbid(unsafe_code)]

mod bits;
mod graphs;
mod memory;
mod refused;
