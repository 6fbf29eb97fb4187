//! What the assembled kernels are made of: `code.json`, which `code.py` has counted in their SASS.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Instructions of a warp, by kind.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Count {
    pub(crate) all: f64,
    pub(crate) fma: f64,
    pub(crate) mma: f64,
    pub(crate) special: f64,
    pub(crate) shared: f64,
    pub(crate) copies: f64,
    pub(crate) loads: f64,
    pub(crate) stores: f64,
    /// Multiply-adds that read two registers of one bank: a cycle more.
    pub(crate) conflicts: f64,
    /// Cycles of a lone warp that finds in no time what it reads from memory.
    pub(crate) alone: f64,
    /// How often it waits for memory, one time after another.
    pub(crate) memory: f64,
}

/// A kernel.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Code {
    pub(crate) registers: u32,
    /// From the first instruction to the last, by one turn of the hot loop.
    pub(crate) way: Count,
    /// A turn of the loop that multiplies.
    pub(crate) hot: Option<Count>,
    /// Instructions for each copy to shared memory, where not every turn copies.
    #[serde(default)]
    pub(crate) copy: f64,
    /// A turn of the loop before it, that copies the first stages of a product.
    pub(crate) first: Option<Count>,
    /// A turn, or some in one, of the loop behind it that multiplies the last stages, when nothing is left to be copied.
    pub(crate) last: Option<Count>,
    /// A turn of the loop behind it, that stores.
    pub(crate) tail: Option<Count>,
}

/// Instructions of an element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activations {
    pub(crate) gelu: f64,
    pub(crate) silu: f64,
    /// Of BF16's, the only products that end so.
    pub(crate) gelu_derivative: f64,
}

/// The kernels of an architecture.
pub(crate) struct Kernels(BTreeMap<String, Code>);

impl Kernels {
    /// Those of `sm_90` or `sm_121`.
    ///
    /// # Panics
    /// When the file has none: it is part of the program.
    pub(crate) fn of(arch: &str) -> Self {
        let mut all: BTreeMap<String, BTreeMap<String, Code>> =
            serde_json::from_str(include_str!("../code.json")).expect("code.py has written it");
        Self(all.remove(arch).expect("code.py has counted both"))
    }

    /// What activations cost where they follow a product: as by themselves, without reads and stores to speak of.
    pub(crate) fn activations(&self) -> Activations {
        // A thread has 16 bytes.
        let of_element = |kernel, elements| self.get(kernel).map_or(0.0, |code| code.way.all / elements);
        Activations {
            gelu: of_element("gelu_forward_f32", 4.0),
            silu: of_element("swiglu_forward_f32", 4.0),
            gelu_derivative: of_element("gelu_backward_bf16", 8.0),
        }
    }

    /// The kernel of this name; none if it was not there when they were counted.
    pub(crate) fn get(&self, name: &str) -> Option<&Code> {
        self.0.get(name)
    }
}
