//! Random numbers of a step. A captured step draws new ones in each replay.
//!
//! Invariant: the numbers depend only on the generator's seed and step, the call's number within
//! the step, and the element's index. They are the same on every device, captured or not.

#![forbid(unsafe_code)]

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::step::Step;
use crate::tensor::{LentMut, Saved, Source, Target};
use kernels::dropout as kernel;
use std::cell::Cell;

/// A seed and the number of the next step, in device memory. Each step or replay that uses it draws
/// different numbers.
///
/// ```
/// use stepscope::ops;
/// use stepscope::prelude::*;
///
/// # fn main() -> Result<()> {
/// # let device = Device::open(DeviceKind::Emulated)?;
/// # let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build()?;
/// let generator = ops::Generator::new(&device, 7)?;
/// let dropped = arena.step(|step| {
///     let draws = generator.draws(step)?;
///     let x = step.upload(&[1.0f32; 1000], [1000])?;
///     step.read(&ops::dropout(step, &x, 0.2, &draws.next())?)
/// })?;
/// let zeros = dropped.iter().filter(|&&y| y == 0.0).count();
/// assert!((150..250).contains(&zeros) && dropped.iter().all(|&y| y == 0.0 || y == 1.25));
/// assert_eq!(generator.read()?, (7, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Generator {
    seed: u64,
    /// The seed and the step, low word first.
    state: Buffer<u32>,
}

impl Generator {
    /// Makes a generator before its first step.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when the device has no room.
    pub fn new(device: &Device, seed: u64) -> Result<Self> {
        Self::at(device, seed, 0)
    }

    /// Makes a generator that continues at a step, such as the one that [`Generator::read`]
    /// returned.
    pub fn at(device: &Device, seed: u64, step: u64) -> Result<Self> {
        Ok(Self { seed, state: Buffer::from_slice(device, words(seed, step).as_flattened())? })
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Sets the seed and the step, after the work queued before. Captured steps that draw from the
    /// generator use them too.
    pub fn set(&mut self, seed: u64, step: u64) -> Result<()> {
        self.seed = seed;
        self.state.write(0, words(seed, step).as_flattened())
    }

    /// Reads the seed and the number of the next step. Waits.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the device's deadline.
    pub fn read(&self) -> Result<(u64, u64)> {
        let words = self.state.read()?;
        let word = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        Ok((word(0), word(2)))
    }

    /// Draws the random numbers of this step. Call it once per step, because each call advances the
    /// generator to the next step. Queued, one launch.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the generator is on another device, and in the closure of
    /// [`Tape::recompute`](crate::Tape::recompute), which uses the draws of the enclosing tape.
    /// [`Error::ArenaFull`].
    #[track_caller]
    pub fn draws<'s>(&self, step: &Step<'s>) -> Result<Draws<'s>> {
        if step.runs_again() {
            let expected = "the tape's draws (`Tape::with_generator`) in a recomputed closure";
            return Err(Error::misuse(
                "draws",
                expected,
                "another generator, which would draw different numbers in the second run",
            ));
        }
        step.borrow(&self.state, true)?;
        // Nobody else has the buffer, and all writes to it are queued.
        let mut state = LentMut::new(self.state.memory(), [4].into());
        let mut draw = step.empty([4])?;
        let (generator, next) = state.in_place();
        step.launch(kernel::draw { generator, next, draw: draw.out() })?;
        Ok(Draws { draw: draw.save(), calls: Cell::new(0) })
    }
}

fn words(seed: u64, step: u64) -> [[u32; 2]; 2] {
    [seed, step].map(|word| [word as u32, (word >> 32) as u32])
}

/// The random numbers of a step, for as many calls as ask for them.
#[derive(Debug)]
pub struct Draws<'s> {
    draw: Saved<'s, u32>,
    calls: Cell<u32>,
}

impl<'s> Draws<'s> {
    /// Returns the same draws for a nested scope, as if this many calls had been made.
    pub(crate) fn within<'i>(&self, calls: u32) -> Draws<'i> {
        Draws { draw: Saved::new(self.draw.memory(), self.draw.shape()), calls: Cell::new(calls) }
    }

    /// The number of calls made.
    pub(crate) fn calls(&self) -> u32 {
        self.calls.get()
    }

    /// Sets the number of calls made.
    pub(crate) fn skip_to(&self, calls: u32) {
        self.calls.set(calls);
    }

    /// The numbers of the next call, which no other call shares.
    pub fn next(&self) -> Draw<'s> {
        Draw { draw: self.draw, call: self.calls.replace(self.calls.get().wrapping_add(1)) }
    }
}

/// The random numbers of a call. They are the same each time they are used.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'s> {
    pub(crate) draw: Saved<'s, u32>,
    pub(crate) call: u32,
}
