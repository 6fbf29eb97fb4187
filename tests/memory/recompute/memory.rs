//! The memory of a step with recomputing, exact where it is simple. All memory of a closure is
//! freed.

use crate::support::on_each_device;
use stepscope::check::MemoryRecorder;
use stepscope::memory::Kind;
use stepscope::nn::{MultiHeadAttention, RmsNorm, SwiGlu};
use stepscope::ops::Precision;
use stepscope::{Arena, Capacity, Device, Error, Gradients, ParameterSpec, Parameters, Result, Tape, Var};

/// Returns the bytes of a tensor with this many f32, as an arena counts them.
fn bytes(elements: usize) -> usize {
    (elements * 4).next_multiple_of(256)
}

fn nothing(device: &Device) -> (Arena, Parameters) {
    let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    let mut spec = ParameterSpec::builder();
    spec.add("w", [1], stepscope::parameters::Initializer::ONE);
    (arena, Parameters::new(device, &spec.build().unwrap(), 1).unwrap())
}

/// Makes ten tensors in a row.
fn ten<'s>(x: &Var<'s>) -> Result<Var<'s>> {
    (0..10).try_fold(*x, |x, _| x.mul(0.5))
}

/// A block whose norms, attention and SwiGLU are recomputed together.
#[derive(Clone)]
struct Block {
    norms: [RmsNorm; 2],
    attention: MultiHeadAttention,
    mlp: SwiGlu,
}

impl Block {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, x: &Var<'s>) -> Result<Var<'s>> {
        let x = x.add(self.attention.forward(tape, &self.norms[0].forward(tape, x)?)?)?;
        self.mlp.forward_residual(tape, &self.norms[1].forward(tape, &x)?, &x)
    }
}

/// Returns the bytes of a step over a stack of blocks.
fn stack(device: &Device, layers: usize, tokens: usize, on: bool) -> usize {
    const WIDTH: usize = 64;
    let mut spec = ParameterSpec::builder();
    let blocks: Vec<Block> = (0..layers)
        .map(|n| Block {
            norms: [0, 1].map(|norm| RmsNorm::new(spec.at(format!("{n}.norm{norm}")), WIDTH)),
            attention: MultiHeadAttention::new(spec.at(format!("{n}.attention")), WIDTH, 2).causal(),
            mlp: SwiGlu::new(spec.at(format!("{n}.mlp")), WIDTH, 3 * WIDTH, WIDTH),
        })
        .collect();
    let weights = Parameters::new(device, &spec.build().unwrap(), 1).unwrap();
    let mut gradients = Gradients::zeros(&weights).unwrap();
    let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
    let measured = arena.measure(|step| {
        let tape = Tape::new(step, &weights);
        let mut x = tape.input(step.empty([1, tokens, WIDTH])?);
        for block in &blocks {
            let block = block.clone();
            x = if on {
                tape.recompute(x, move |tape, x| block.forward(tape, &x))?
            } else {
                block.forward(&tape, &x)?
            };
        }
        let loss = tape.mean(&x)?;
        tape.backward_overwrite(&loss, &mut gradients)
    });
    measured.unwrap().high_water_bytes()
}

on_each_device! {
    /// One of a closure's ten tensors is left, and the next closure reuses their memory.
    fn closure_keeps_only_its_result(device: &Device) {
        let (arena, weights) = nothing(device);
        let one = bytes(1000);
        for parts in 1..5 {
            let taken = arena.measure(|step| {
                let tape = Tape::new(step, &weights);
                let mut x = tape.input(step.empty([1000])?);
                for _ in 0..parts {
                    x = tape.recompute(x, |_, x| ten(&x))?;
                }
                Ok(())
            });
            // While the last closure's ten tensors exist: the input, the results so far, and the
            // copy.
            assert_eq!(taken.unwrap().high_water_bytes(), (1 + parts + 10) * one, "{parts} parts");
        }
    }

    /// Backward allocates a closure's tensors and gradients at the other end of the arena. It
    /// leaves the input's gradient in the place of the result's.
    fn backward_leaves_nothing(device: &Device) {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [1000, 8], stepscope::parameters::Initializer::ONE);
        let weights = Parameters::new(device, &spec.build().unwrap(), 1).unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let one = bytes(1000);
        let taken = |parts: usize, gradients: &mut Gradients| {
            let taken = arena.measure(|step| {
                let tape = Tape::new(step, &weights);
                let input = tape.input(step.empty([125, 1000])?);
                let mut x = tape.linear(&input, w, None)?;
                for _ in 0..parts {
                    x = tape.recompute(x, |_, x| ten(&x))?;
                }
                let loss = tape.mean(&x)?;
                tape.backward_overwrite(&loss, gradients)
            });
            taken.unwrap().high_water_bytes()
        };
        let first = taken(1, &mut gradients);
        for parts in 2..5 {
            assert_eq!(taken(parts, &mut gradients), first + (parts - 1) * one, "each part adds one result, and no gradient");
        }
    }

    /// A closure's memory is freed when it fails or panics.
    fn failed_closure_leaves_nothing(device: &Device) {
        let (mut arena, weights) = nothing(device);
        let one = bytes(1000);
        for end in [0, 1] {
            let fail = move |tape: &Tape<'_, '_>| {
                let made = tape.step().empty::<f32>([1000])?;
                assert!(end == 0, "a panic, with {made:?}");
                Err(Error::misuse("test", "nothing", "an error"))
            };
            let taken = arena.measure(|step| {
                let tape = Tape::new(step, &weights);
                let x = tape.input(step.empty([1000])?);
                for _ in 0..3 {
                    let run = std::panic::AssertUnwindSafe(|| {
                        tape.recompute(x, move |tape, x| fail(tape).and_then(|()| ten(&x)))
                    });
                    assert!(!matches!(std::panic::catch_unwind(run), Ok(Ok(_))));
                }
                step.empty::<f32>([2000]).map(drop)
            });
            assert_eq!(taken.unwrap().high_water_bytes(), one + bytes(2000));
        }
        // The whole arena is free.
        arena.step(|step| step.empty::<f32>([(1 << 20) / 4]).map(drop)).unwrap();
    }

    /// The end of the arena shows, within a recording, that the closure's memory was freed. Its
    /// result stays.
    fn recording_frees_closure_memory(device: &Device) {
        let (mut arena, weights) = nothing(device);
        let recorder = MemoryRecorder::start(&mut arena, 1000);
        arena.step(|step| {
            let tape = Tape::new(step, &weights);
            let x = tape.input(step.empty([1000])?);
            tape.recompute(x, |_, x| ten(&x)).map(drop)
        }).unwrap();
        let recording = recorder.recording();
        let of = |kind| recording.events().filter(move |event| event.kind == kind).map(|event| (event.address, event.bytes));
        let [start] = of(Kind::Reserve).collect::<Vec<_>>()[..] else { panic!("the recording contains one arena") };
        let one = bytes(1000);
        let end = start.0 + (1 << 20);
        assert_eq!(of(Kind::Rewind).collect::<Vec<_>>(), [(end - 10 * one as u64, 10 * one)]);
        assert_eq!(of(Kind::Reset).collect::<Vec<_>>(), [(start.0, 2 * one)]);
        assert_eq!(of(Kind::Allocate).last(), Some((start.0 + one as u64, 4000)), "the result lies directly after the input");
    }

    /// A recomputed part fits its measured size. With less there is no memory for its result: this
    /// is an error, and the step is as before.
    fn a_full_arena_is_an_error(device: &Device) {
        let (_, weights) = nothing(device);
        let run = |capacity: usize| {
            let mut arena = Arena::builder(device).capacity(Capacity::Bytes(capacity)).build().unwrap();
            arena.step(|step| {
                let tape = Tape::new(step, &weights);
                let x = tape.input(step.upload(&[1.0; 1000], [1000])?);
                let y = tape.recompute(x, |tape, x| {
                    tape.step().set_precision(Precision::Tf32);
                    ten(&x)
                });
                assert_eq!(step.precision() == Precision::Tf32, y.is_ok(), "a failed recomputation must leave the precision");
                step.read(y?.value())
            })
        };
        let needs = 12 * bytes(1000);
        assert_eq!(run(needs).unwrap(), [0.5f32.powi(10); 1000]);
        assert!(matches!(run(needs - 1), Err(Error::ArenaFull { .. })));
    }

    /// A recomputed stack of blocks takes an input for each block, and the memory of one
    /// block instead of all; bytes are counted per token.
    fn stack_keeps_one_input_per_block(device: &Device) {
        let take = |layers, tokens, on| stack(device, layers, tokens, on) as f64;
        let input = |tokens: usize| (tokens * 64 * 4) as f64;
        for tokens in [256, 1024] {
            let each = take(9, tokens, true) - take(8, tokens, true);
            assert_eq!(each, input(tokens), "one more block takes the memory of one more input");
            let whole = take(9, tokens, false) - take(8, tokens, false);
            assert!(whole > 16.0 * input(tokens), "without recomputation, one block takes only {} inputs", whole / input(tokens));
            // One block holds what its forward pass keeps, and the gradients in between, which all
            // blocks share.
            let [all, one] = [take(8, tokens, true), take(1, tokens, false)].map(|bytes| bytes / input(tokens));
            assert!(all < 11.0 + one, "all blocks take {all} inputs, one block {one}");
        }
        for on in [true, false] {
            let [short, middle, long] = [1024, 2048, 4096].map(|tokens| take(4, tokens, on));
            let growth = (long - middle) / (middle - short);
            assert!((growth - 2.0).abs() < 0.02, "bytes must grow linearly with tokens: {short}, {middle}, {long}");
        }
    }
}
