//! Dropout (Srivastava et al., 2014), whose random numbers are drawn again in backward and drawn anew in each replay.
//!
//! Invariant: what is dropped follows from the generator's seed and step, the call's number within the step, and the element's place: not from
//! the device, nor from whether the step is captured.

use crate::autograd::{Tape, Var};
use crate::driver::Device;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::ops;
use crate::step::Step;
use crate::tensor::{LentMut, Saved, Source, Stored, Target, Tensor};
use kernels::dropout as kernel;
use std::cell::Cell;

/// A seed and the number of the next step, in device memory: each step that asks, or is replayed, draws other numbers.
///
/// ```
/// use stepscope::*;
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
    /// Seed and step, the low word of each first.
    state: Buffer<u32>,
}

impl Generator {
    /// A generator before its first step.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is no room.
    pub fn new(device: &Device, seed: u64) -> Result<Self> {
        Self::at(device, seed, 0)
    }

    /// A generator that goes on with a step, where [`Generator::read`] has told its number.
    ///
    /// # Errors
    /// As for [`Generator::new`].
    pub fn at(device: &Device, seed: u64, step: u64) -> Result<Self> {
        let words = [seed, step].map(|word| [word as u32, (word >> 32) as u32]);
        Ok(Self { state: Buffer::from_slice(device, words.as_flattened())? })
    }

    /// The seed, and the number of the next step. Waits.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the device's deadline.
    pub fn read(&self) -> Result<(u64, u64)> {
        let words = self.state.read()?;
        let word = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        Ok((word(0), word(2)))
    }

    /// The random numbers of this step, once for the step: the next draws are the next step's. Queued, one launch.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the generator is on another device; [`Error::ArenaFull`].
    #[track_caller]
    pub fn draws<'s>(&self, step: &Step<'s>) -> Result<Draws<'s>> {
        step.borrow(&self.state, true)?;
        // Nobody else has the buffer, and what writes it is queued.
        let mut state = LentMut::new(self.state.memory(), [4].into());
        let mut draw = step.empty([4])?;
        let (generator, next) = state.in_place();
        step.launch(kernel::draw { generator, next, draw: draw.out() })?;
        Ok(Draws { draw: draw.save(), calls: Cell::new(0) })
    }
}

/// The random numbers of a step: as many as its calls ask for.
#[derive(Debug)]
pub struct Draws<'s> {
    draw: Saved<'s, u32>,
    calls: Cell<u32>,
}

impl<'s> Draws<'s> {
    /// The numbers of the next call, none of which another call has.
    pub fn next(&self) -> Draw<'s> {
        Draw { draw: self.draw, call: self.calls.replace(self.calls.get().wrapping_add(1)) }
    }
}

/// The random numbers of a call, the same each time that they are used.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'s> {
    draw: Saved<'s, u32>,
    call: u32,
}

/// `y = 0` with probability `p`, else `x / (1 - p)`, element by element; `x`, `y`: any shape of at most 2^34 elements. The same call on the
/// gradient of y is the backward pass: it draws the same numbers.
///
/// Queued, one launch, no scratch; same bits on every device. Element i has word `i mod 4` of Philox4x32-10 with the seed as key and `(i / 4, call,
/// step)` as counter; it is dropped where that is below `p 2^32`.
///
/// # Errors
/// [`Error::Misuse`] for a p that is not in `[0, 1)`; [`Error::ArenaFull`].
#[track_caller]
pub fn dropout<'s, S: Stored>(
    step: &Step<'s>,
    x: &impl Source<'s, S>,
    p: f32,
    draw: &Draw<'s>,
) -> Result<Tensor<'s, S>> {
    if !(0.0..1.0).contains(&p) {
        return Err(Error::misuse("dropout", "a probability in [0, 1)", p.to_string()));
    }
    // A product with a power of two: exact.
    let threshold = (f64::from(p) * 2f64.powi(32)) as u32;
    let mut y = step.empty(x.shape())?;
    step.launch(kernel::dropout {
        x: x.slice(),
        draw: draw.draw.slice(),
        call: draw.call,
        threshold,
        scale: 1.0 / (1.0 - p),
        y: y.out(),
    })?;
    Ok(y)
}

impl<'s> Tape<'_, 's> {
    /// [`ops::dropout`] by the next numbers of the step; `x`, result: any shape. Backward draws them again: nothing is kept.
    ///
    /// # Errors
    /// Those of the op.
    #[track_caller]
    pub fn dropout<S: Stored>(&self, x: &Var<'s, S>, p: f32, draws: &Draws<'s>) -> Result<Var<'s, S>> {
        let op = self.op("dropout", [x])?;
        let draw = draws.next();
        let (y, x) = (ops::dropout(self.step(), x.value(), p, &draw)?, *x);
        Ok(op.record(y.save(), move |back, dy| {
            let dx = ops::dropout(back.step(), &dy, p, &draw)?;
            back.add(&x, dx)
        }))
    }
}
