//! One op in a poisoned arena.
//!
//! Invariant: a trial succeeds only if every word of the arena is right at its end. Inputs are as
//! uploaded, outputs are as read and fully written, and all else is poison. So a kernel fails that
//! misses an element, writes outside its output (padding included) or changes an input. A kernel
//! that reads what it should not meets a NaN. The same must hold in a second run at other
//! addresses, and on a GPU also in the emulator, each with the same bits.

use crate::support;
use std::cell::RefCell;
use std::ops::{Deref, Range};
use stepscope::tensor::{Element, Indices, Shape, Source};
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Error, Result, Step, Tensor, ops};

/// A NaN that no arithmetic makes.
const POISON: u32 = 0x7fc0_dead;
/// The elements between the starts of tensors: 256 bytes.
const ALIGN: usize = 64;
/// The elements of a tensor that marks a place.
pub(crate) const MARK: usize = 61 * ALIGN;
/// The bytes of the arena that is tried first.
const LEAST_BYTES: usize = 1 << 17;

/// Returns the bits by which results are compared: those of the number, and one pattern for all
/// NaNs.
pub(crate) fn canonical(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

/// Asserts that two results have the same bits, NaNs aside.
#[track_caller]
pub(crate) fn assert_same(what: impl std::fmt::Display, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let different = got.iter().zip(want).position(|(&got, &want)| canonical(got) != canonical(want));
    if let Some(at) = different {
        panic!("{what}: element {at} of {} is {:e}, not {:e}", got.len(), got[at], want[at]);
    }
}

/// Asserts that an op refused, with these words.
#[track_caller]
pub(crate) fn assert_refused<R>(outcome: Result<R>, words: &[&str]) {
    let Err(error) = outcome else { panic!("the call succeeded, but {words:?} is wrong") };
    assert!(matches!(error, Error::Misuse { .. } | Error::Contract { .. }), "{error:?}");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "\"{word}\" is not in: {message}");
    }
}

/// A case, as the runs of a trial see it. They are compiled once for all cases.
type Case<'c> = dyn for<'t, 's> Fn(&Trial<'t, 's>) -> Result<()> + 'c;

/// Runs `case` under this module's checks, and returns the result of its first run.
#[track_caller]
pub(crate) fn trial<R>(device: &Device, case: impl for<'t, 's> Fn(&Trial<'t, 's>) -> Result<R>) -> R {
    first_result(case, |case| {
        let first = twice(device, case);
        if device.description().kind == DeviceKind::Cuda {
            let emulator = support::open(DeviceKind::Emulated);
            again(&mut Room::new(&emulator, LEAST_BYTES), 0, case, &first, "on the emulator");
        }
    })
}

/// Runs [`trial`] without the emulator's run, for an op that would take it minutes.
#[track_caller]
pub(crate) fn trial_of_one<R>(device: &Device, case: impl for<'t, 's> Fn(&Trial<'t, 's>) -> Result<R>) -> R {
    first_result(case, |case| drop(twice(device, case)))
}

/// Calls `runs` with a case, and returns the result of the case's first run.
#[track_caller]
fn first_result<R>(case: impl for<'t, 's> Fn(&Trial<'t, 's>) -> Result<R>, runs: impl FnOnce(&Case<'_>)) -> R {
    let first = RefCell::new(None);
    runs(&|trial: &Trial<'_, '_>| {
        let result = case(trial)?;
        first.borrow_mut().get_or_insert(result);
        Ok(())
    });
    first.into_inner().expect("the case ran")
}

/// Runs `case` at two addresses, and returns the outputs.
#[track_caller]
fn twice(device: &Device, case: &Case<'_>) -> Outputs {
    let mut room = Room::new(device, LEAST_BYTES);
    let first = poisoned(&mut room, 0, case);
    again(&mut room, 3, case, &first, "in a second run at other addresses");
    first
}

/// Runs `case` once more and asserts that its outputs are those of the `first` run.
#[track_caller]
fn again(room: &mut Room, shift: usize, case: &Case<'_>, first: &Outputs, place: &str) {
    let again = poisoned(room, shift, case);
    assert_eq!(first.len(), again.len());
    for (number, (first, again)) in first.iter().zip(&again).enumerate() {
        let different = first.iter().zip(again).position(|(&a, &b)| same_word(a) != same_word(b));
        assert_eq!(different, None, "the bits of output {number} differ {place}, first at this element");
    }
}

fn same_word(word: u32) -> u32 {
    canonical(f32::from_bits(word))
}

/// A step whose memory is watched.
pub(crate) struct Trial<'t, 's> {
    step: &'t EagerStep<'s>,
    base: u64,
    ledger: RefCell<Ledger>,
}

/// The expected contents of the arena, by index of the word.
#[derive(Default)]
struct Ledger {
    /// Inputs and outputs in the order of their calls; a later one replaces an earlier one.
    known: Vec<(usize, Vec<u32>)>,
    /// Ranges that an op may have used as scratch.
    scratch: Vec<Range<usize>>,
    outputs: Vec<Vec<u32>>,
}

impl<'s> Trial<'_, 's> {
    /// Returns the device of the trial.
    pub(crate) fn device(&self) -> &Device {
        self.step.device()
    }

    /// Uploads an input.
    pub(crate) fn upload<T: Element>(&self, values: &[T], shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let tensor = self.step.upload(values, shape)?;
        let at = self.place(&tensor);
        self.ledger.borrow_mut().known.push((at, words(values)));
        Ok(tensor)
    }

    /// Uploads indices.
    pub(crate) fn upload_indices(&self, values: &[u32], shape: impl Into<Shape>) -> Result<Indices<'s>> {
        let indices = self.step.upload_indices(values, shape)?;
        let at = self.place(indices.values());
        self.ledger.borrow_mut().known.push((at, words(values)));
        Ok(indices)
    }

    /// Reads a tensor that an op has made or changed.
    pub(crate) fn output<T: Element>(&self, tensor: &impl Source<'s, T>) -> Result<Vec<T>> {
        let values = self.step.read(tensor)?;
        let words = words(&values);
        let unwritten = words.iter().position(|&word| word == POISON);
        assert_eq!(unwritten, None, "an output of {} was never written, first at this element", tensor.shape());
        let at = self.place(tensor);
        let mut ledger = self.ledger.borrow_mut();
        ledger.known.push((at, words.clone()));
        ledger.outputs.push(words);
        Ok(values)
    }

    /// Runs an op that takes scratch memory in addition to its outputs.
    pub(crate) fn with_scratch<R>(&self, op: impl FnOnce() -> Result<R>) -> Result<R> {
        // The markers have a size that no op frees, so they lie before and after the memory that
        // the op takes.
        let start = self.place(&self.step.empty::<u32>([MARK])?);
        let result = op()?;
        let end = self.place(&self.step.empty::<u32>([MARK])?);
        self.ledger.borrow_mut().scratch.push(start..end);
        Ok(result)
    }

    fn place<T: Element>(&self, tensor: &impl Source<'s, T>) -> usize {
        (tensor.slice().address() - self.base) as usize / size_of::<u32>()
    }
}

impl<'s> Deref for Trial<'_, 's> {
    type Target = Step<'s>;

    fn deref(&self) -> &Step<'s> {
        self.step
    }
}

/// Returns the words of memory that holds these values, followed by poison.
fn words<T: Element>(values: &[T]) -> Vec<u32> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let word = |bytes: &[u8]| {
        let mut word = POISON.to_le_bytes();
        word[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(word)
    };
    bytes.chunks(size_of::<u32>()).map(word).collect()
}

type Outputs = Vec<Vec<u32>>;

/// An arena and its capacity.
struct Room {
    arena: Arena,
    bytes: usize,
}

impl Room {
    fn new(device: &Device, bytes: usize) -> Self {
        let arena = Arena::builder(device).capacity(Capacity::Bytes(bytes)).build();
        Self { arena: arena.unwrap_or_else(|error| panic!("{error}")), bytes }
    }
}

/// Runs `case` after `shift` other tensors, in a larger arena if it needs one.
fn poisoned(room: &mut Room, shift: usize, case: &Case<'_>) -> Outputs {
    loop {
        match attempt(room, shift, case) {
            Err(Error::ArenaFull { .. }) if room.bytes < 1 << 30 => {
                *room = Room::new(&room.arena.device().clone(), 4 * room.bytes);
            }
            outcome => return outcome.unwrap_or_else(|error| panic!("{error}")),
        }
    }
}

fn attempt(Room { arena, bytes }: &mut Room, shift: usize, case: &Case<'_>) -> Result<Outputs> {
    let words = *bytes / size_of::<u32>();
    arena.step(|step| ops::fill(step, [words], f32::from_bits(POISON)).map(drop))?;
    let ledger = arena.step(|step| {
        // Without elements it still gives the address of the first words.
        let base = step.empty::<u32>([shift * ALIGN])?.slice().address();
        let trial = Trial { step, base, ledger: RefCell::default() };
        case(&trial)?;
        Ok(trial.ledger.into_inner())
    })?;
    let image = arena.step(|step| step.read(&step.empty::<u32>([words])?))?;
    ledger.check(&image);
    Ok(ledger.outputs)
}

impl Ledger {
    fn check(&self, image: &[u32]) {
        let mut expected = vec![Some(POISON); image.len()];
        for scratch in &self.scratch {
            expected[scratch.clone()].fill(None);
        }
        for (at, words) in &self.known {
            let padded = words.len().next_multiple_of(ALIGN);
            expected[*at..at + padded].fill(Some(POISON));
            for (expected, &word) in expected[*at..].iter_mut().zip(words) {
                *expected = Some(word);
            }
        }
        let wrong = (0..image.len()).find(|&at| expected[at].is_some_and(|expected| expected != image[at]));
        if let Some(at) = wrong {
            let known = self.known.iter().map(|(at, words)| (at, words.len())).collect::<Vec<_>>();
            panic!("a stray write: word {at} became {:#010x}; tensors lie at (word, length) {known:?}", image[at]);
        }
    }
}

/// Tests of the harness itself: it catches each kind of mistake.
mod catches {
    use super::*;
    use std::panic::catch_unwind;

    fn fails(case: impl for<'t, 's> Fn(&Trial<'t, 's>) -> Result<()> + std::panic::RefUnwindSafe, words: &str) {
        let device = support::open(DeviceKind::Emulated);
        let panicked =
            catch_unwind(std::panic::AssertUnwindSafe(|| trial(&device, &case))).expect_err("the case passed");
        let message = panicked.downcast_ref::<String>().expect("a message");
        assert!(message.contains(words), "{message}");
    }

    #[test]
    fn unwritten_output() {
        fails(|trial| trial.output(&trial.empty::<f32>([5])?).map(drop), "never written");
    }

    #[test]
    fn write_outside_the_output() {
        fails(|trial| ops::fill(trial, [5], 1.0).map(drop), "a stray write: word 64 became 0x3f800000");
    }

    #[test]
    fn changed_input() {
        let changes = |trial: &Trial<'_, '_>| {
            let mut x = trial.upload(&[1.0, 2.0], [2])?;
            ops::fill_into(trial, &mut x, 2.0)
        };
        fails(changes, "a stray write: word 64 became 0x40000000");
    }

    #[test]
    fn different_bits_between_runs() {
        let runs = std::sync::atomic::AtomicU32::new(0);
        let differs = move |trial: &Trial<'_, '_>| {
            let run = runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let y = ops::fill(trial, [3], run as f32)?;
            trial.output(&y).map(drop)
        };
        fails(differs, "the bits of output 0 differ in a second run at other addresses");
    }
}
