//! Sweeps a function over all 2^32 bit patterns, or every n-th of them. Compares a device's results
//! with the CPU's, and the CPU's with the reference.
//!
//! Invariant: a tally does not depend on how the range is split, or on the order in which parts
//! finish.

use crate::reference::{Function, error_ulps};
use kernels::scalars::scalars;
use rayon::prelude::*;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;
use stepscope::tensor::Target;
use stepscope::{Arena, Result};

/// Inputs per launch: 16 MiB of results.
pub(crate) const BLOCK: usize = 1 << 22;
/// Inputs per work item of a CPU thread.
const SHARE: usize = 1 << 14;

/// A range of inputs: the floats with bits `first + i stride` for `i` below `length`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) first: u32,
    pub(crate) stride: u32,
    pub(crate) length: usize,
}

impl Range {
    /// Returns every `stride`-th of the 2^32 patterns, in ranges of at most [`BLOCK`].
    fn blocks(stride: u32) -> impl Iterator<Item = Self> {
        let inputs = (1u64 << 32).div_ceil(u64::from(stride)) as usize;
        (0..inputs).step_by(BLOCK).map(move |start| Self {
            first: (start as u64 * u64::from(stride)) as u32,
            stride,
            length: BLOCK.min(inputs - start),
        })
    }

    fn input(self, index: usize) -> f32 {
        f32::from_bits(self.first.wrapping_add((index as u32).wrapping_mul(self.stride)))
    }

    /// Computes the function's results with the kernel.
    pub(crate) fn on_device(self, arena: &mut Arena, function: &Function) -> Result<Vec<f32>> {
        let Self { first, stride, length } = self;
        arena.step(|step| {
            let mut y = step.empty([length])?;
            step.launch(scalars { y: y.out(), length, function: function.number, first, stride })?;
            step.read(&y)
        })
    }

    fn judge(self, function: &Function, device: &[f32]) -> Tally {
        assert_eq!(device.len(), self.length);
        let share = |(number, results): (usize, &[f32])| {
            let mut tally = Tally::default();
            for (at, &result) in results.iter().enumerate() {
                tally.count(function, self.input(number * SHARE + at), result);
            }
            tally
        };
        device.par_chunks(SHARE).enumerate().map(share).reduce(Tally::default, Tally::and)
    }
}

/// Tallies every `stride`-th input. `results` returns the device's results for a range. The device
/// computes a range while the CPU checks the previous one.
///
/// # Errors
/// When `results` fails.
pub(crate) fn sweep(
    function: &Function,
    stride: u32,
    mut results: impl FnMut(Range) -> Result<Vec<f32>> + Send,
) -> Result<Tally> {
    thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(1);
        let device = scope.spawn(move || {
            for range in Range::blocks(stride) {
                if sender.send((range, results(range)?)).is_err() {
                    break; // the judge has panicked
                }
            }
            Ok(())
        });
        let tallies = receiver.iter().map(|(range, results): (Range, Vec<f32>)| range.judge(function, &results));
        let tally = tallies.fold(Tally::default(), Tally::and);
        device.join().unwrap_or_else(|panic| resume_unwind(panic)).map(|()| tally)
    })
}

/// An input for which device and CPU give different bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Difference {
    pub(crate) input: f32,
    pub(crate) device: f32,
    pub(crate) cpu: f32,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [input, device, cpu] = [self.input, self.device, self.cpu].map(f32::to_bits);
        write!(f, "first at {:e} ({input:#010x}): {device:#010x} on the device, {cpu:#010x} on the CPU", self.input)
    }
}

/// The result of a sweep.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) inputs: u64,
    /// The number of results that differ (NaNs aside), and the first of them.
    pub(crate) differences: u64,
    pub(crate) first_difference: Option<Difference>,
    /// The largest distance to the reference, and the first input with it.
    pub(crate) worst_ulps: f64,
    pub(crate) worst_input: f32,
}

impl Tally {
    fn count(&mut self, function: &Function, input: f32, device: f32) {
        let cpu = (function.cpu)(input);
        self.inputs += 1;
        if device.to_bits() != cpu.to_bits() && !(device.is_nan() && cpu.is_nan()) {
            self.differences += 1;
            self.first_difference.get_or_insert(Difference { input, device, cpu });
        }
        let ulps = error_ulps(cpu, (function.reference)(f64::from(input)));
        if ulps > self.worst_ulps {
            (self.worst_ulps, self.worst_input) = (ulps, input);
        }
    }

    /// Returns true if all bits are equal and no error exceeds the bound in `math.rs`.
    pub(crate) fn holds(&self, function: &Function) -> bool {
        self.differences == 0 && self.worst_ulps <= function.stated_ulps
    }

    /// Merges two tallies; `later` covers later inputs.
    fn and(self, later: Self) -> Self {
        let (worst_ulps, worst_input) = if later.worst_ulps > self.worst_ulps {
            (later.worst_ulps, later.worst_input)
        } else {
            (self.worst_ulps, self.worst_input)
        };
        Self {
            inputs: self.inputs + later.inputs,
            differences: self.differences + later.differences,
            first_difference: self.first_difference.or(later.first_difference),
            worst_ulps,
            worst_input,
        }
    }
}
