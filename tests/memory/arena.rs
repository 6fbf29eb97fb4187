//! Random programs of steps, scratches and tensors against a model in plain Rust.
//!
//! The model knows the contents of every live tensor, the arena's position and the numbers of each
//! report. A byte handed out twice, a saved tensor overwritten, or memory not freed shows as a
//! wrong value or number.

#![forbid(unsafe_code)]

mod program;

use crate::support::{Random, bits, on_each_device};
use program::{Op, Outcome, outcomes, programs};
use proptest::collection::vec;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use stepscope::nn::Mlp;
use stepscope::tensor::{Saved, ScratchStep};
use stepscope::{
    Arena, Buffer, Capacity, Device, EagerStep, Error, Gradients, ParameterSpec, Parameters, Result, Step, Tape,
    Tensor, ops,
};

/// The elements of the buffer that outlives the steps. This is also the most frequent tensor
/// length, so that the two often match.
const BUFFER_LEN: usize = 64;
/// Memory for a few tens of tensors, so that programs fill it now and then.
const CAPACITY_BYTES: usize = 24 * 1024;

/// Returns an error with the numbers of a full arena. Cause, advice and report have separate tests.
fn full(requested_bytes: usize, used_bytes: usize, capacity_bytes: usize, allocations: u64) -> Error {
    let got = format!("{requested_bytes} bytes, {used_bytes} of {capacity_bytes} used by {allocations}");
    Error::Misuse { op: "full", expected: "room".into(), got }
}

/// Returns the numbers of an error from a full arena.
fn numbers(error: Error) -> Error {
    match error {
        Error::ArenaFull { requested_bytes, used_bytes, capacity_bytes, allocations, .. } => {
            full(requested_bytes, used_bytes, capacity_bytes, allocations)
        }
        other => other,
    }
}

/// The expected reports of the arena and contents of the buffer.
#[derive(Clone, Debug, Default)]
struct Model {
    used_bytes: usize,
    step_allocations: u64,
    high_water_bytes: usize,
    allocations: u64,
    resets: u64,
}

impl Model {
    /// Allocates a tensor, or returns the error that the arena must give.
    fn take(&mut self, elements: usize) -> Result<(), Error> {
        let Some(bytes) = elements.checked_mul(size_of::<f32>()) else {
            let (op, expected) = ("tensor", "a shape whose size fits the address space".into());
            return Err(Error::Misuse { op, expected, got: format!("[{elements}]") });
        };
        let padded = bytes.max(1).checked_next_multiple_of(256).unwrap_or(usize::MAX);
        match self.used_bytes.checked_add(padded) {
            Some(end) if end <= CAPACITY_BYTES => {
                self.used_bytes = end;
                self.high_water_bytes = self.high_water_bytes.max(end);
                self.step_allocations += 1;
                self.allocations += 1;
                Ok(())
            }
            _ => Err(full(padded, self.used_bytes, CAPACITY_BYTES, self.step_allocations)),
        }
    }

    /// Ends a scope that began at `mark`.
    fn rewind(&mut self, mark: &Self) {
        (self.used_bytes, self.step_allocations) = (mark.used_bytes, mark.step_allocations);
    }
}

/// The objects that outlive the steps.
struct Objects {
    device: Device,
    model: Model,
    buffer: Buffer<f32>,
    buffer_values: Vec<f32>,
}

/// A tensor that is still unique, or one that has been saved.
enum Value<'s> {
    Unique(Tensor<'s>),
    Saved(Saved<'s>),
}

/// Calls an expression generic over sources with either kind of value.
macro_rules! with {
    ($value:expr, |$source:ident| $body:expr) => {
        match $value {
            Value::Unique($source) => $body,
            Value::Saved($source) => $body,
        }
    };
}

/// The tensors of a scope, each with its expected contents.
type Live<'s> = Vec<(Value<'s>, Vec<f32>)>;

/// A step or a scratch.
trait Scope<'s> {
    /// The tensors of the outer scope.
    type Outer;

    fn step(&self) -> &Step<'s>;

    fn upload(&self, values: &[f32], len: usize) -> Option<Result<Tensor<'s>>>;

    /// Returns a copy of an outer tensor, and its expected contents.
    fn copy_of_outer(&self, outer: &Self::Outer, index: Index) -> Option<(usize, Result<Tensor<'s>>, Vec<f32>)>;

    /// Writes a value to an outer tensor of the same length, if that is unique.
    fn write_outer(&self, outer: &mut Self::Outer, index: Index, value: &(Value<'s>, Vec<f32>));

    fn look(&self, value: &Value<'s>, device: &Device) -> Vec<f32>;

    fn scratch<R>(&mut self, run: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<R>) -> Result<R>;
}

impl<'s> Scope<'s> for EagerStep<'s> {
    type Outer = ();

    fn step(&self) -> &Step<'s> {
        self
    }

    fn upload(&self, values: &[f32], len: usize) -> Option<Result<Tensor<'s>>> {
        Some(EagerStep::upload(self, values, [len]))
    }

    fn copy_of_outer(&self, (): &(), _: Index) -> Option<(usize, Result<Tensor<'s>>, Vec<f32>)> {
        None
    }

    fn write_outer(&self, (): &mut (), _: Index, _: &(Value<'s>, Vec<f32>)) {}

    fn look(&self, value: &Value<'s>, _: &Device) -> Vec<f32> {
        with!(value, |x| self.read(x)).unwrap()
    }

    fn scratch<R>(&mut self, run: impl for<'i> FnOnce(&mut ScratchStep<'i, 's>) -> Result<R>) -> Result<R> {
        EagerStep::scratch(self, run)
    }
}

impl<'i, 'o> Scope<'i> for ScratchStep<'i, 'o> {
    type Outer = Live<'o>;

    fn step(&self) -> &Step<'i> {
        self
    }

    fn upload(&self, _: &[f32], _: usize) -> Option<Result<Tensor<'i>>> {
        None
    }

    fn copy_of_outer(&self, outer: &Live<'o>, index: Index) -> Option<(usize, Result<Tensor<'i>>, Vec<f32>)> {
        let (value, values) = choose(outer, index)?;
        let copy = with!(value, |x| ops::copy(self, &self.lend(x)));
        Some((values.len(), copy, values.clone()))
    }

    fn write_outer(&self, outer: &mut Live<'o>, index: Index, (value, values): &(Value<'i>, Vec<f32>)) {
        if outer.is_empty() {
            return;
        }
        let at = index.index(outer.len());
        let (Value::Unique(out), out_values) = &mut outer[at] else { return };
        let written = with!(value, |x| ops::copy_into(self, x, &mut self.lend_mut(out)));
        if values.len() == out_values.len() {
            written.unwrap();
            out_values.clone_from(values);
        } else {
            assert!(matches!(written, Err(Error::Misuse { op: "copy", .. })), "{written:?}");
        }
    }

    fn look(&self, value: &Value<'i>, device: &Device) -> Vec<f32> {
        // A scratch cannot read: its values leave through a buffer.
        with!(value, |x| {
            let len = x.shape().elements();
            if len == 0 {
                return Vec::new();
            }
            let mut buffer = Buffer::from_slice(device, &vec![f32::NAN; len]).unwrap();
            ops::copy_into(self, x, &mut self.step().lend_mut(&mut buffer, [len]).unwrap()).unwrap();
            buffer.read().unwrap()
        })
    }

    fn scratch<R>(&mut self, run: impl for<'n> FnOnce(&mut ScratchStep<'n, 'i>) -> Result<R>) -> Result<R> {
        ScratchStep::scratch(self, run)
    }
}

fn choose<'l, 's>(live: &'l Live<'s>, index: Index) -> Option<&'l (Value<'s>, Vec<f32>)> {
    (!live.is_empty()).then(|| &live[index.index(live.len())])
}

/// The payload of a planned panic, which distinguishes it from a failed assertion.
struct Planned;

fn planned() -> Error {
    Error::Misuse { op: "test", expected: "a failure".into(), got: "it".into() }
}

/// Runs a scope to its planned end.
fn run<'s, S: Scope<'s>>(
    scope: &mut S,
    outer: &mut S::Outer,
    program: &[Op],
    outcome: Outcome,
    objects: &mut Objects,
) -> Result<()> {
    let mut live = Live::new();
    for op in program {
        run_op(scope, outer, op, &mut live, objects);
    }
    look(scope, &live, objects);
    match outcome {
        Outcome::Returns => Ok(()),
        Outcome::Fails => Err(planned()),
        // Bypasses the panic hook, which would print.
        Outcome::Panics => resume_unwind(Box::new(Planned)),
    }
}

fn look<'s>(scope: &impl Scope<'s>, live: &Live<'s>, objects: &Objects) {
    for (value, expected) in live {
        assert_eq!(bits(&scope.look(value, &objects.device)), bits(expected));
    }
    assert_eq!(bits(&objects.buffer.read().unwrap()), bits(&objects.buffer_values));
}

fn run_op<'s, S: Scope<'s>>(scope: &mut S, outer: &mut S::Outer, op: &Op, live: &mut Live<'s>, objects: &mut Objects) {
    let (step, model) = (scope.step(), &mut objects.model);
    // A new tensor's length, the library's answer and the expected contents.
    let made = match op {
        Op::Upload(len, seed) => {
            let values = Random::new(*seed).normals(*len);
            scope.upload(&values, *len).map(|tensor| (*len, tensor, values))
        }
        Op::Fill(len, value) => Some((*len, ops::fill(step, [*len], *value), vec![*value; *len])),
        Op::Copy(of) => choose(live, *of)
            .map(|(value, values)| (values.len(), with!(value, |x| ops::copy(step, x)), values.clone())),
        Op::Scale(of, factor) => choose(live, *of).map(|(value, values)| {
            let scaled = values.iter().map(|x| x * factor).collect();
            (values.len(), with!(value, |x| ops::scale(step, x, *factor)), scaled)
        }),
        Op::Add(a, b) => match (choose(live, *a), choose(live, *b)) {
            (Some((a, a_values)), Some((b, b_values))) if a_values.len() == b_values.len() => {
                let sum = a_values.iter().zip(b_values).map(|(a, b)| a + b).collect();
                Some((a_values.len(), with!(a, |a| with!(b, |b| ops::add(step, a, b))), sum))
            }
            _ => None,
        },
        Op::FromBuffer => {
            let lent = step.lend(&objects.buffer, [BUFFER_LEN]).unwrap();
            Some((BUFFER_LEN, ops::copy(step, &lent), objects.buffer_values.clone()))
        }
        Op::FromOuter(of) => scope.copy_of_outer(outer, *of),
        Op::TooLarge(len) => Some((*len, step.empty([*len]), Vec::new())),
        _ => None,
    };
    if let Some((len, tensor, values)) = made {
        match (tensor, model.take(len)) {
            (Ok(tensor), Ok(())) => live.push((Value::Unique(tensor), values)),
            (Err(error), Err(expected)) => assert_eq!(numbers(error), expected),
            (got, expected) => panic!("{op:?}: got {got:?}, expected {expected:?}"),
        }
        return;
    }
    match op {
        Op::AddAssign(out, a) if !live.is_empty() => {
            let places = [out, a].map(|index| index.index(live.len()));
            let Ok([out, a]) = live.get_disjoint_mut(places) else { return };
            let ((Value::Unique(out), out_values), (a, a_values)) = (out, a) else { return };
            if out_values.len() == a_values.len() {
                with!(a, |a| ops::add_assign(step, out, a)).unwrap();
                out_values.iter_mut().zip(a_values).for_each(|(out, a)| *out += *a);
            }
        }
        Op::Overwrite(out, value) if !live.is_empty() => {
            let at = out.index(live.len());
            if let (Value::Unique(out), values) = &mut live[at] {
                ops::fill_into(step, out, *value).unwrap();
                values.fill(*value);
            }
        }
        Op::Save(of) if !live.is_empty() => {
            let (value, values) = live.swap_remove(of.index(live.len()));
            let saved = match value {
                Value::Unique(tensor) => tensor.save(),
                Value::Saved(saved) => saved,
            };
            live.push((Value::Saved(saved), values));
        }
        Op::ToBuffer(of) => {
            if let Some((value, values)) = choose(live, *of).filter(|(_, values)| values.len() == BUFFER_LEN) {
                let mut out = step.lend_mut(&mut objects.buffer, [BUFFER_LEN]).unwrap();
                with!(value, |x| ops::copy_into(step, x, &mut out)).unwrap();
                objects.buffer_values.clone_from(values);
            }
        }
        Op::ToOuter(out, of) => {
            if let Some(value) = choose(live, *of) {
                scope.write_outer(outer, *out, value);
            }
        }
        Op::WrongShape => {
            if let Some(tensor) = scope.upload(&[1.0, 2.0], 3) {
                assert!(matches!(tensor, Err(Error::Misuse { op: "upload", .. })), "{tensor:?}");
            }
        }
        Op::Look => look(scope, live, objects),
        Op::Scratch(program, outcome) => {
            let mark = objects.model.clone();
            let ended =
                catch_unwind(AssertUnwindSafe(|| scope.scratch(|inner| run(inner, live, program, *outcome, objects))));
            ends_as(ended, *outcome);
            objects.model.rewind(&mark);
        }
        _ => {}
    }
}

/// Checks that a scope ended as planned.
fn ends_as(ended: std::thread::Result<Result<()>>, outcome: Outcome) {
    match ended {
        Ok(result) => assert_eq!(result, if outcome == Outcome::Fails { Err(planned()) } else { Ok(()) }),
        Err(payload) if payload.is::<Planned>() => assert_eq!(outcome, Outcome::Panics),
        Err(failure) => resume_unwind(failure),
    }
}

/// Runs steps one after another on one arena.
fn run_steps(device: &Device, steps: &[(Vec<Op>, Outcome)]) {
    let mut arena = Arena::builder(device).capacity(Capacity::Bytes(CAPACITY_BYTES)).build().unwrap();
    let buffer_values = Random::new(1).normals(BUFFER_LEN);
    let buffer = Buffer::from_slice(device, &buffer_values).unwrap();
    let mut objects = Objects { device: device.clone(), model: Model::default(), buffer, buffer_values };
    for (program, outcome) in steps {
        let mark = objects.model.clone();
        let ended =
            catch_unwind(AssertUnwindSafe(|| arena.step(|step| run(step, &mut (), program, *outcome, &mut objects))));
        ends_as(ended, *outcome);
        objects.model.rewind(&mark);
        objects.model.resets += 1;
        let (report, model) = (arena.report(), &objects.model);
        assert_eq!(report.capacity_bytes, CAPACITY_BYTES);
        assert_eq!(report.high_water_bytes, model.high_water_bytes);
        assert_eq!(report.allocations, model.allocations);
        assert_eq!(report.overflow.allocations, 0);
        assert_eq!(report.resets, model.resets, "a step that {outcome:?} must reset the arena");
        // All of the arena is free again, and not a byte more.
        let everything = arena.step(|step| {
            let _all = step.empty::<f32>([CAPACITY_BYTES / 4])?;
            Ok(step.empty::<f32>([1]).err().map(numbers))
        });
        assert_eq!(everything, Ok(Some(full(256, CAPACITY_BYTES, CAPACITY_BYTES, 1))));
        objects.model.high_water_bytes = CAPACITY_BYTES;
        (objects.model.allocations, objects.model.resets) = (objects.model.allocations + 1, objects.model.resets + 1);
    }
}

on_each_device! {
    fn programs_agree_with_the_model(device: &Device) {
        let steps = vec((programs(2, 24), outcomes()), 1..5);
        // A failing program is printed after shrinking: it needs no file.
        let mut runner = TestRunner::new(Config { cases: 1000, failure_persistence: None, ..Config::default() });
        runner.run(&steps, |steps| {
            run_steps(device, &steps);
            Ok(())
        }).unwrap_or_else(|failure| panic!("{failure}"));
    }

    fn full_arena_reports_failed_request(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::Bytes(1000)).build().unwrap();
        let error = arena.step(|step| {
            let _held = [step.empty::<f32>([1])?, step.empty([65])?];
            step.scratch(|inner| {
                let _ends_here = inner.empty::<f32>([1])?;
                Ok(())
            })?;
            let x = step.upload(&[1.0f32, 2.0, 3.0], [3]);
            x.map(drop)
        });
        assert_eq!(numbers(error.unwrap_err()), full(256, 768, 1000, 2));
    }

    fn steps_continue_after_full_arena(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::Bytes(1024)).build().unwrap();
        let values = arena.step(|step| {
            let x = step.upload(&[1.0f32, 2.0], [2])?;
            assert!(matches!(ops::fill(step, [1000], 0.0), Err(Error::ArenaFull { .. })));
            let y = ops::scale(step, &x, 3.0)?;
            Ok([step.read(&x)?, step.read(&y)?])
        });
        assert_eq!(values, Ok([vec![1.0, 2.0], vec![3.0, 6.0]]));
    }

    fn freed_memory_is_reused_by_size(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::Bytes(1024)).build().unwrap();
        let values = arena.step(|step| {
            let mut x = step.upload(&[1.0f32; 64], [64])?;
            let kept = step.upload(&[7.0f32; 64], [64])?.save();
            for _ in 0..10 {
                let next = ops::scale(step, &x, 2.0)?;
                step.free(std::mem::replace(&mut x, next));
            }
            // An inner scope neither reuses memory freed in the outer scope nor keeps its own.
            step.scratch(|inner| {
                let one = ops::scale(inner, &inner.lend(&kept), 1.0)?;
                inner.free(one);
                ops::fill(inner, [64], 5.0).map(drop)
            })?;
            let y = ops::scale(step, &x, 1.0)?;
            assert!(matches!(ops::fill(step, [65], 0.0), Err(Error::ArenaFull { .. })), "blocks may neither be split nor merged");
            Ok([step.read(&x)?, step.read(&y)?, step.read(&kept)?])
        });
        assert_eq!(values, Ok([vec![1024.0; 64], vec![1024.0; 64], vec![7.0; 64]]));
        let report = arena.report();
        assert_eq!((report.high_water_bytes, report.allocations), (1024, 15));
    }

    fn backward_memory_is_independent_of_layers(device: &Device) {
        let needs = |layers: usize, backward: bool| {
            let mut spec = ParameterSpec::builder();
            let mlp = |n| Mlp::new(spec.at(format!("layers.{n}")), 64, 64, 64);
            let mlps: Vec<Mlp> = (0..layers).map(mlp).collect();
            let weights = Parameters::new(device, &spec.build()?, 7)?;
            let mut gradients = Gradients::zeros(&weights)?;
            let arena = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
            let measured = arena.measure(|step| {
                let tape = Tape::new(step, &weights);
                let mut x = tape.input(step.empty::<f32>([256, 64])?);
                for mlp in &mlps {
                    x = mlp.forward_residual(&tape, &x, &x)?;
                }
                let loss = tape.mean(&x)?;
                if backward { tape.backward_overwrite(&loss, &mut gradients) } else { Ok(()) }
            })?;
            Ok::<usize, Error>(measured.high_water_bytes())
        };
        let [forward, whole] = [false, true].map(|backward| [4, 12].map(|layers| needs(layers, backward).unwrap()));
        assert_eq!(whole[1] - whole[0], forward[1] - forward[0], "{forward:?}, {whole:?}");
    }

    fn empty_tensors_take_a_place(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::Bytes(768)).build().unwrap();
        arena.step(|step| {
            let full = step.upload(&[5.0f32; 64], [64])?;
            let none = step.upload::<f32>(&[], [0, 7])?;
            let copy = ops::copy(step, &none)?;
            assert_eq!(step.read(&copy)?.len(), 0);
            assert_eq!(step.read(&full)?, [5.0; 64]);
            Ok(())
        }).unwrap();
        assert_eq!(arena.report().high_water_bytes, 768);
    }

    fn invalid_arenas_and_buffers_are_refused(device: &Device) {
        let build = |bytes| Arena::builder(device).capacity(Capacity::Bytes(bytes)).build().map(drop);
        assert!(matches!(build(0), Err(Error::Misuse { op: "arena", .. })), "{:?}", build(0));
        let huge = 1 << 62;
        assert!(matches!(build(huge), Err(Error::Refused(refusal)) if refusal.requested_bytes == huge as u64));
        assert!(matches!(Buffer::<f32>::zeros(device, 0), Err(Error::Misuse { op: "buffer", .. })));
        let mut buffer = Buffer::from_slice(device, &[1u32, 2, 3]).unwrap();
        assert!(matches!(buffer.write(2, &[7, 7]), Err(Error::Misuse { op: "buffer.write", .. })));
        assert!(matches!(buffer.write(usize::MAX, &[7]), Err(Error::Misuse { op: "buffer.write", .. })));
        assert!(matches!(buffer.read_range(1, 3), Err(Error::Misuse { op: "buffer.read", .. })));
        buffer.write(1, &[9]).unwrap();
        assert_eq!(buffer.read().unwrap(), [1, 9, 3]);
        assert_eq!(buffer.read_range(1, 2).unwrap(), [9, 3]);
    }

    fn buffers_lend_whole_and_locally(device: &Device) {
        let elsewhere = Device::open(stepscope::DeviceKind::Emulated).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let mut here = Buffer::from_slice(device, &[1.0f32; 6]).unwrap();
        let mut there = Buffer::from_slice(&elsewhere, &[1.0f32; 6]).unwrap();
        arena.step(|step| {
            assert_eq!(step.read(&step.lend(&here, [2, 3])?)?, [1.0; 6]);
            assert!(matches!(step.lend(&here, [5]), Err(Error::Misuse { op: "lend", .. })));
            assert!(matches!(step.lend_mut(&mut here, [7]), Err(Error::Misuse { op: "lend", .. })));
            assert!(matches!(step.lend(&there, [6]), Err(Error::Misuse { op: "lend", .. })));
            assert!(matches!(step.lend_mut(&mut there, [6]), Err(Error::Misuse { op: "lend", .. })));
            Ok(())
        }).unwrap();
    }

    fn mismatched_shapes_are_refused(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        arena.step(|step| {
            let x = step.upload(&[1.0f32; 6], [2, 3])?;
            let y = step.upload(&[1.0f32; 6], [3, 2])?;
            assert!(matches!(ops::add(step, &x, &y), Err(Error::Misuse { op: "add", .. })));
            let mut x = x.reshape([3, 2])?;
            ops::add_assign(step, &mut x, &y)?;
            assert_eq!(step.read(&x)?, [2.0; 6]);
            assert!(matches!(step.read_scalar(&x), Err(Error::Misuse { op: "read_scalar", .. })));
            assert!(matches!(x.reshape([4, 2]), Err(Error::Misuse { op: "reshape", .. })));
            assert!(matches!(y.save().reshape([usize::MAX, 2]), Err(Error::Misuse { op: "reshape", .. })));
            Ok(())
        }).unwrap();
    }
}
