//! The instruction counts of the assembled kernels, from `code.json`, which `code.py` counts in
//! their SASS.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Instructions of a warp, by kind.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Count {
    pub all: f64,
    pub fma: f64,
    pub mma: f64,
    pub special: f64,
    pub shared: f64,
    pub copies: f64,
    pub loads: f64,
    pub stores: f64,
    /// Multiply-adds with a register bank conflict, which take one more cycle.
    pub conflicts: f64,
    /// Cycles of a lone warp if memory reads took no time.
    pub alone: f64,
    /// The number of successive waits for memory.
    pub memory: f64,
}

/// A kernel.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Code {
    pub registers: u32,
    /// The path from the first instruction to the last, with one iteration of the hot loop.
    pub way: Count,
    /// One iteration of the multiplying loop.
    pub hot: Option<Count>,
    /// Instructions per copy to shared memory, if not every iteration copies.
    #[serde(default)]
    pub copy: f64,
    /// One iteration of the loop before it, which copies the first stages of a product.
    pub first: Option<Count>,
    /// One or more iterations of the loop after it, which multiplies the last stages when nothing
    /// is left to copy.
    pub last: Option<Count>,
    /// One iteration of the storing loop after it.
    pub tail: Option<Count>,
}

/// Instructions per element.
#[derive(Clone, Copy, Debug)]
pub struct Activations {
    pub gelu: f64,
    pub silu: f64,
    /// Only products that store BF16 have this epilogue.
    pub gelu_derivative: f64,
}

/// The kernels of an architecture.
pub struct Kernels(BTreeMap<String, Code>);

impl Kernels {
    /// Returns the kernels of `sm_90` or `sm_121`.
    ///
    /// # Panics
    /// Panics if `code.json`, which is part of the program, lacks this architecture.
    pub fn of(arch: &str) -> Self {
        let mut all: BTreeMap<String, BTreeMap<String, Code>> =
            serde_json::from_str(include_str!("../code.json")).expect("cargo xtask generate has written it");
        Self(all.remove(arch).expect("cargo xtask generate has counted both"))
    }

    /// Returns the cost of activations in an epilogue. It equals the cost of the elementwise
    /// kernels, whose reads and stores are negligible.
    pub fn activations(&self) -> Activations {
        // A thread has 16 bytes.
        let of_element = |kernel, elements| self.get(kernel).map_or(0.0, |code| code.way.all / elements);
        Activations {
            gelu: of_element("gelu_forward_f32", 4.0),
            silu: of_element("swiglu_forward_f32", 4.0),
            gelu_derivative: of_element("gelu_backward_bf16", 8.0),
        }
    }

    /// Returns the kernel of this name, or none if it did not exist when they were counted.
    pub fn get(&self, name: &str) -> Option<&Code> {
        self.0.get(name)
    }
}
