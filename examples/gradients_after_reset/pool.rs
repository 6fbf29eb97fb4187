//! Naive storage of activations, with the bug: the same step hands memory out again.
//!
//! It works like ztensor's pool: free slots are handed out last in, first out, and pins mark the
//! slots that backward still needs. The bug is in [`Pool::pin_all`]: pins are lost after the first
//! reset.

use super::perceptron::{Keeper, ROWS, WIDTH};
use stepscope::tensor::Source;
use stepscope::{Buffer, Device, Result, Step, Tensor, ops};

/// A free list of slots, each `[ROWS, WIDTH]`.
pub(crate) struct Pool {
    slots: Vec<Buffer<f32>>,
    free: Vec<usize>,
    used: Vec<usize>,
    pins: Vec<usize>,
    /// True if pins are lost from now on.
    loses_pins: bool,
}

impl Pool {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let slots = (0..16).map(|_| Buffer::zeros(device, ROWS * WIDTH)).collect::<Result<Vec<_>>>()?;
        let free = (0..slots.len()).rev().collect();
        Ok(Self { slots, free, used: Vec::new(), pins: Vec::new(), loses_pins: false })
    }

    /// Pins all slots that forward has written.
    pub(crate) fn pin_all(&mut self) {
        if !self.loses_pins {
            self.pins.extend(&self.used);
        }
    }

    /// Frees every slot that is not pinned.
    pub(crate) fn recycle(&mut self) {
        let pins = &self.pins;
        let (kept, freed): (Vec<_>, Vec<_>) = self.used.drain(..).partition(|slot| pins.contains(slot));
        self.free.extend(freed);
        self.used = kept;
    }

    /// Frees every slot. Later pins are lost if `loses_pins`.
    pub(crate) fn reset(&mut self, loses_pins: bool) {
        self.pins.clear();
        self.recycle();
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.loses_pins = loses_pins;
    }
}

impl<'s> Keeper<'s> for Pool {
    fn keep(&mut self, step: &Step<'s>, tensor: Tensor<'s>) -> Result<usize> {
        let slot = self.free.pop().expect("a free slot");
        self.used.push(slot);
        ops::copy_into(step, &tensor, &mut step.lend_mut(&mut self.slots[slot], tensor.shape())?)?;
        Ok(slot)
    }

    fn kept(&self, step: &Step<'s>, number: usize) -> Result<impl Source<'s, f32>> {
        step.lend(&self.slots[number], [ROWS, WIDTH])
    }
}
