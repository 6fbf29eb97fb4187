//! What a launch has to do: of a block, instructions by kind and bytes, and how often it waits.

use kernels::matmul::{GATE, GELU_DERIVATIVE};
use stepscope::Launch;

use super::code::{Code, Count, Kernels};
use super::{attention, product, stream};

/// Memory that a launch touches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    /// The kernel's parameter.
    pub(crate) name: &'static str,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// How often all of it is gone through, one time after another.
    pub(crate) passes: u64,
    /// What is written and not read is written as a whole.
    pub(crate) read: bool,
    pub(crate) written: bool,
}

/// A launch, for the clock.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) blocks: u64,
    pub(crate) warps: f64,
    /// Of a block.
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) registers: u32,
    /// Turns of a warp through its loop.
    pub(crate) turns: f64,
    /// Of a turn of a warp.
    pub(crate) turn: Count,
    /// Cycles of shared memory of a turn of a warp.
    pub(crate) turn_shared: f64,
    /// Cycles that a warp waits in a turn, besides.
    pub(crate) turn_waits: f64,
    /// How often a warp waits for memory in a turn, besides.
    pub(crate) turn_memory_waits: f64,
    /// Instructions of a warp before and behind the loop, and the cycles that a lone warp takes for them.
    pub(crate) ends: f64,
    pub(crate) ends_alone: f64,
    /// Bytes that a block asks for within its loop, while it computes; and before and behind it.
    pub(crate) streamed: f64,
    pub(crate) moved: f64,
    /// How often a block waits for memory, one time after another.
    pub(crate) waits: f64,
    pub(crate) touches: Vec<Touch>,
    /// Whether its matrix instructions take all the power that the GPU may have.
    pub(crate) is_hot: bool,
    /// Operations, two for a multiply-add: in f32, by matrix instructions.
    pub(crate) flops: [f64; 2],
    /// Floating-point operations of an `mma` instruction of a warp.
    pub(crate) mma_flops: f64,
}

impl Work {
    /// The work of a launch. A kernel that was not there when the code was counted, as another package's, is taken for a short one.
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

    /// Instructions of all warps.
    pub(crate) fn instructions(&self) -> f64 {
        self.blocks as f64 * self.warps * (self.turns * self.turn.all + self.ends)
    }

    /// Bytes that it touches, each once.
    pub(crate) fn touched(&self) -> u64 {
        self.touches.iter().map(|touch| touch.bytes).sum()
    }

    /// Bytes that it reads and writes, each once.
    pub(crate) fn moves(&self) -> f64 {
        self.touches
            .iter()
            .map(|touch| touch.bytes as f64 * f64::from(u8::from(touch.read) + u8::from(touch.written)))
            .sum()
    }

    /// A launch that touches all of its arguments once; the rest is none.
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
            touches: touches(launch),
            is_hot: launch.entry.name.contains("_of_bf16_"),
            flops: [0.0; 2],
            mma_flops: 0.0,
        }
    }
}

/// Whether a product, or the sum of its chunks, reads `c`: it adds it where `beta`, its last parameter but one, is not 0, or its flags, the
/// last, say that the sum is multiplied by it, or by a derivative of it.
pub(crate) fn adds(launch: &Launch) -> bool {
    let words = launch.words.as_slice();
    launch.entry.pointers.contains(&"c")
        && (f32::from_bits(words[words.len() - 2] as u32) != 0.0
            || words[words.len() - 1] as u32 & (GATE | GELU_DERIVATIVE) != 0)
}

/// Each region once.
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

/// Whether a kernel that writes an argument reads it before: weights and moments are updated in place, and `scale_by` may add.
fn updates(launch: &Launch, argument: &str) -> bool {
    let name = launch.entry.name;
    // Behind two slices, of two words each.
    let accumulates = || launch.words.as_slice().get(4).is_some_and(|&accumulate| accumulate != 0);
    (name.starts_with("adamw") || name.starts_with("sgd")) && argument != "copy"
        || name.starts_with("scale_by") && argument == "out" && accumulates()
}

/// Elements of a table that are touched, at most: a row of it for each of another argument.
fn rows(launch: &Launch, argument: &str) -> Option<usize> {
    const TABLES: [(&str, &str, &str); 3] =
        [("embedding_forward", "table", "y"), ("gather", "x", "y"), ("rows_sum", "out", "dy")];
    let known = |(kernel, table, _): &&(&str, &str, &str)| launch.entry.name.starts_with(kernel) && *table == argument;
    let (_, _, others) = TABLES.iter().find(known)?;
    let at = launch.entry.pointers.iter().position(|name| name == others)?;
    Some(launch.words.extents()[at].length)
}
