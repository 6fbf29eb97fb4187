//! The work of a launch: per block, the instructions by kind, the bytes, and the number of waits.

use kernels::matmul::{EpilogueForm, GELU_DERIVATIVE, SWIGLU};
use stepscope_core::internals::Launch;

use crate::code::{Code, Count, Kernels};
use crate::{attention, product, stream};

/// A region of memory that a launch touches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    /// The kernel's parameter.
    pub(crate) name: &'static str,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The number of successive passes over it.
    pub(crate) passes: u64,
    /// True if it is read. A region that is only written is written completely.
    pub(crate) read: bool,
    pub(crate) written: bool,
}

/// The work of a launch, as input to the clock.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) blocks: u64,
    pub(crate) warps: f64,
    /// Per block.
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) registers: u32,
    /// Loop iterations per warp.
    pub(crate) turns: f64,
    /// Instructions per iteration and warp.
    pub(crate) turn: Count,
    /// Shared-memory cycles per iteration and warp.
    pub(crate) turn_shared: f64,
    /// Additional waiting cycles per iteration and warp.
    pub(crate) turn_waits: f64,
    /// Additional memory waits per iteration and warp.
    pub(crate) turn_memory_waits: f64,
    /// Instructions of a warp before and after the loop, and the cycles that a lone warp needs for
    /// them.
    pub(crate) ends: f64,
    pub(crate) ends_alone: f64,
    /// Bytes that a block requests in its loop, while it computes, and bytes before and after it.
    pub(crate) streamed: f64,
    pub(crate) moved: f64,
    /// The number of successive memory waits of a block.
    pub(crate) waits: f64,
    /// The parts of a block that compute and move bytes independently of each other, if it has no
    /// loop: one, or its warps.
    pub(crate) parts: f64,
    pub(crate) touches: Vec<Touch>,
    /// True if its tensor-core instructions reach the GPU's power limit.
    pub(crate) is_hot: bool,
    /// Operations, two per multiply-add: in f32, and by tensor cores.
    pub(crate) flops: [f64; 2],
    /// Floating-point operations per `mma` instruction of a warp.
    pub(crate) mma_flops: f64,
}

impl Work {
    /// Computes the work of a launch. A kernel without instruction counts, such as another
    /// package's, is assumed to be short.
    pub(crate) fn of(launch: &Launch, kernels: &Kernels) -> Self {
        let code = kernels.get(launch.entry.name).copied().unwrap_or(Code {
            registers: 64,
            way: Count { all: 100.0, ..Count::default() },
            hot: None,
            first: None,
            last: None,
            tail: None,
            copy: 0.0,
        });
        let name = launch.entry.name;
        if name.starts_with("matmul_") {
            product::work(launch, &code, kernels.activations())
        } else if name.starts_with("flash_") && !name.starts_with("flash_delta") {
            attention::work(launch, &code)
        } else {
            stream::work(launch, &code)
        }
    }

    /// Returns the instructions of all warps.
    pub(crate) fn instructions(&self) -> f64 {
        self.blocks as f64 * self.warps * (self.turns * self.turn.all + self.ends)
    }

    /// Returns the bytes touched, each once.
    pub(crate) fn touched(&self) -> u64 {
        self.touches.iter().map(|touch| touch.bytes).sum()
    }

    /// Returns the bytes read and written, each once.
    pub(crate) fn moves(&self) -> f64 {
        self.touches
            .iter()
            .map(|touch| touch.bytes as f64 * f64::from(u8::from(touch.read) + u8::from(touch.written)))
            .sum()
    }

    /// Returns the work of a launch that touches all its arguments once, with everything else zero.
    pub(crate) fn plain(launch: &Launch, code: &Code) -> Self {
        let entry = launch.entry;
        Self {
            blocks: launch.grid.blocks(),
            warps: f64::from(entry.block.div_ceil(32)),
            threads: entry.block,
            shared_bytes: entry.shared_bytes,
            registers: code.registers,
            turns: 0.0,
            turn: Count::default(),
            turn_shared: 0.0,
            turn_waits: 0.0,
            turn_memory_waits: 0.0,
            ends: 0.0,
            ends_alone: 0.0,
            streamed: 0.0,
            moved: 0.0,
            waits: 0.0,
            parts: 1.0,
            touches: touches(launch),
            is_hot: launch.entry.name.contains("_of_bf16_") || launch.entry.is_warpgroup,
            flops: [0.0; 2],
            mma_flops: 0.0,
        }
    }
}

/// Returns true if a product, or the sum of its split-K parts, reads `c`. It adds `c` if `beta` is
/// not 0, and multiplies by `c`, or by a derivative of it, if its flags request it. The epilogue's
/// numbers are the last parameter.
pub(crate) fn adds(launch: &Launch) -> bool {
    let reads = |form: EpilogueForm| form.beta != 0.0 || form.flags & (SWIGLU | GELU_DERIVATIVE) != 0;
    launch.entry.pointers.contains(&"c") && reads(launch.words.last())
}

/// Returns each region once.
fn touches(launch: &Launch) -> Vec<Touch> {
    let named = launch.entry.pointers.iter().zip(launch.words.extents()).filter(|(_, extent)| extent.length > 0);
    let (adds, is_product) = (adds(launch), launch.entry.pointers.contains(&"pre"));
    named
        .filter(|(name, _)| adds || **name != "c" || !is_product)
        .map(|(&name, extent)| Touch {
            name,
            address: extent.address,
            bytes: rows(launch, name).unwrap_or(extent.length).min(extent.length) as u64 * extent.element_bytes as u64,
            passes: 1,
            read: !extent.written || updates(launch, name),
            written: extent.written,
        })
        .collect()
}

/// Returns true if a kernel reads the old values of an argument that it writes: weights and moments
/// are updated in place, and `scale_by` may accumulate.
fn updates(launch: &Launch, argument: &str) -> bool {
    let name = launch.entry.name;
    // The flag follows two slices of two words each.
    let accumulates = || launch.words.as_slice().get(4).is_some_and(|&accumulate| accumulate != 0);
    (name.starts_with("adamw") || name.starts_with("sgd")) && argument != "copy"
        || name.starts_with("scale_by") && argument == "out" && accumulates()
}

/// Returns the most elements of a table that are touched: one row per row of another argument.
fn rows(launch: &Launch, argument: &str) -> Option<usize> {
    const TABLES: [(&str, &str, &str); 3] =
        [("embedding_forward", "table", "y"), ("gather", "x", "y"), ("rows_sum", "out", "dy")];
    let known = |(kernel, table, _): &&(&str, &str, &str)| launch.entry.name.starts_with(kernel) && *table == argument;
    let (_, _, others) = TABLES.iter().find(known)?;
    let at = launch.entry.pointers.iter().position(|name| name == others)?;
    Some(launch.words.extents()[at].length)
}
