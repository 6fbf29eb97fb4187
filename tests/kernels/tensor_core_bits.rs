//! Products and attention by matrix instructions have the same bits by `mma.sync`, by `wgmma`, and
//! on the emulator, which computes the rule of `kernels::mma::rule`.
//!
//! Each call runs on the emulator by `mma.sync`, and then on the emulator by `wgmma`, or on the GPU
//! by each instruction that it has. NaNs count as equal. The test prints how far it is, and each
//! output that differs for the first time. At the end it prints how many values of each output
//! differ from the first device's, and fails if any does.

use crate::flash_reference::{Inputs, PLAIN, SETUPS, Setup, window};
use crate::support::{Random, SPECIAL, narrow, on_each_device};
use crate::trial::canonical;
use kernels::mma::rule;
use kernels::stored::Stored as _;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};
use stepscope::device::MatrixInstruction;
use stepscope::ops::launch::{AttentionKept, BiasGradient, Gradient};
use stepscope::ops::{self, AttentionElement, AttentionMask, Precision, QkNorm};
use stepscope::tensor::Stored;
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Result, Tensor, bf16};

/// The products and the attentions with random extents: for a GPU, and for only the emulator.
const RANDOM: [[usize; 2]; 2] = [[500, 100], [20, 5]];
/// The environment variable with a factor for these numbers.
const TIMES: &str = "STEPSCOPE_RANDOM_CALLS";

/// The numbers of an operand.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    Normal,
    Uniform,
    /// Each second number is almost the negative of the one before.
    Cancelling,
    /// Magnitudes from 2^-40 to 2^40.
    Wide,
    /// Products of two are about 2^-130.
    Tiny,
    /// Subnormal numbers among normal ones.
    Subnormal,
    /// Most are zero, of either sign.
    Sparse,
    /// Infinities, NaNs and other extremes, one in 200.
    Special,
    /// Any bits of a finite number.
    AnyBits,
}

impl Numbers {
    const ALL: [Self; 9] = [
        Self::Normal,
        Self::Uniform,
        Self::Cancelling,
        Self::Wide,
        Self::Tiny,
        Self::Subnormal,
        Self::Sparse,
        Self::Special,
        Self::AnyBits,
    ];

    fn of(self, random: &mut Random, length: usize) -> Vec<f32> {
        let mut values = random.normals(length);
        let power = |exponent: u32| f32::from_bits(exponent << 23);
        match self {
            Self::Normal => {}
            Self::Uniform => values = random.uniforms(length, -1.0, 1.0),
            Self::Cancelling => {
                for at in (1..length).step_by(2) {
                    values[at] = -values[at - 1] * (1.0 + random.below(3) as f32 / 128.0);
                }
            }
            Self::Wide => values.iter_mut().for_each(|x| *x *= power(87 + random.below(81))),
            Self::Tiny => values.iter_mut().for_each(|x| *x *= power(127 - 65)),
            Self::Subnormal => {
                let mut some = |x: &mut f32| *x *= power(if random.below(4) == 0 { 1 } else { 127 });
                values.iter_mut().for_each(&mut some);
                values.iter_mut().step_by(3).for_each(|x| *x *= 0.01);
            }
            Self::Sparse => values.iter_mut().for_each(|x| *x *= random.below(8) as f32 % 7.0 % 2.0),
            Self::Special => {
                for x in &mut values {
                    if random.below(200) == 0 {
                        *x = SPECIAL[random.below(SPECIAL.len() as u32) as usize];
                    }
                }
            }
            Self::AnyBits => values.iter_mut().for_each(|x| {
                let any = f32::from_bits(random.next_u64() as u32);
                *x = if any.is_finite() { any } else { 1.0 };
            }),
        }
        values
    }
}

/// The values of one output, as bits in which all NaNs are equal.
struct Output(&'static str, Vec<u32>);

impl Output {
    fn of<S: Stored>(name: &'static str, values: Vec<S>) -> Self {
        Self(name, values.into_iter().map(|x| canonical(x.widen())).collect())
    }
}

/// The values that were compared, and those that differed.
#[derive(Clone, Copy, Default)]
struct Count {
    all: usize,
    different: usize,
}

/// The time between two reports of progress.
const REPORT: Duration = Duration::from_secs(5);

/// The devices that should agree, and the counts for each kind of call, output and device.
struct Comparison {
    devices: Vec<(String, Arena)>,
    counts: BTreeMap<(String, &'static str, String), Count>,
    random: Random,
    is_gpu: bool,
    calls: usize,
    start: Instant,
    reported: Instant,
}

impl Comparison {
    fn new(device: &Device) -> Self {
        let kind = device.description().kind;
        let mut runs = vec![(DeviceKind::Emulated, MatrixInstruction::MmaSync), (kind, MatrixInstruction::Wgmma)];
        if kind != DeviceKind::Emulated {
            let has_wgmma = device.description().has_wgmma;
            runs.retain(|&(_, instruction)| instruction == MatrixInstruction::MmaSync || has_wgmma);
            runs.push((kind, MatrixInstruction::MmaSync));
        }
        let opened = |(kind, instruction)| {
            let builder = Device::builder(kind).matrix_instruction(instruction);
            let late = Duration::from_secs(600);
            let builder = if kind == DeviceKind::Emulated { builder.deadline(late) } else { builder };
            let device = builder.open().unwrap_or_else(|reason| panic!("{reason}"));
            let arena = Arena::builder(&device).capacity(Capacity::mib(256)).build().unwrap();
            (format!("{kind:?} {instruction}"), arena)
        };
        let devices = runs.into_iter().map(opened).collect();
        let start = Instant::now();
        Self {
            devices,
            counts: BTreeMap::new(),
            random: Random::new(63),
            is_gpu: kind != DeviceKind::Emulated,
            calls: 0,
            start,
            reported: start,
        }
    }

    /// Runs a call on each device, and counts the values that differ from those of the first.
    fn compare(&mut self, kind: &str, call: impl fmt::Debug, run: impl Fn(&EagerStep<'_>) -> Result<Vec<Output>>) {
        self.compare_with(None, kind, call, run);
    }

    /// Compares like [`compare`](Self::compare), with these outputs if they are given.
    fn compare_with(
        &mut self,
        mut want: Option<Vec<Output>>,
        kind: &str,
        call: impl fmt::Debug,
        run: impl Fn(&EagerStep<'_>) -> Result<Vec<Output>>,
    ) {
        for (name, arena) in &mut self.devices {
            let got = arena.step(|step| run(step)).unwrap_or_else(|error| panic!("{kind} {call:?}: {error}"));
            let Some(want) = &want else {
                want = Some(got);
                continue;
            };
            for (Output(output, got), Output(_, want)) in got.iter().zip(want) {
                assert_eq!(got.len(), want.len());
                let count = self.counts.entry((kind.to_string(), output, name.clone())).or_default();
                let unequal = || (0..got.len()).filter(|&at| got[at] != want[at]);
                if let Some(at) = unequal().next().filter(|_| count.different == 0) {
                    let [got, want] = [got[at], want[at]];
                    let [is, should] = [got, want].map(f32::from_bits);
                    println!(
                        "{kind}, {output}, {name}: {call:?} at {at}: {is:e} ({got:08x}), not {should:e} ({want:08x})"
                    );
                }
                count.all += got.len();
                count.different += unequal().count();
            }
        }
        self.calls += 1;
        if self.reported.elapsed() > REPORT {
            let different: usize = self.counts.values().map(|count| count.different).sum();
            println!(
                "{:3.0?}: {} calls, {different} values differ; the last: {kind}",
                self.start.elapsed(),
                self.calls
            );
            self.reported = Instant::now();
        }
    }

    /// Prints the counts.
    ///
    /// # Panics
    /// A value differs.
    fn finish(self) {
        let mut different = 0;
        for ((kind, output, device), count) in &self.counts {
            println!("{kind:24} {output:8} {device:18} {:>12} values, {} differ", count.all, count.different);
            different += count.different;
        }
        println!("{} calls in {:.1?}", self.calls, self.start.elapsed());
        assert_eq!(different, 0, "values differ between devices or instructions");
    }

    /// Compares a product of `F`, stored as `S`: `out = alpha A B + bias + beta out`.
    fn product<F: ops::GemmElement<S>, S: Stored>(&mut self, call: Product, kind: &str) {
        let Product { extents: [m, n, k], transposed, batches, scales: [alpha, beta], bias, pad, numbers } = call;
        let form = ops::Gemm::new(m, n, k);
        let form = if transposed[0] { form.transpose_a() } else { form };
        let form = if transposed[1] { form.transpose_b() } else { form };
        let (lda, ldb) = (form.lda + pad, form.ldb + pad);
        let a_rows = if transposed[0] { k } else { m };
        let b_rows = if transposed[1] { n } else { k };
        let (stride_a, stride_b) = (a_rows * lda, b_rows * ldb);
        let form = ops::Gemm { lda, ldb, batches, stride_a, stride_b, stride_c: m * n, alpha, beta, ..form };
        let random = &mut self.random;
        let [a, b] = [stride_a, stride_b].map(|stride| numbers.of(random, batches * stride));
        let (old, bias) = (random.normals(batches * m * n), random.normals(if bias { n } else { 0 }));
        self.compare(kind, call, |step| {
            step.set_precision(Precision::Tf32);
            let (a, b) = (upload::<F>(step, &a, [a.len()])?, upload::<F>(step, &b, [b.len()])?);
            let all = step.upload(&bias, [bias.len()])?;
            let mut out = upload::<S>(step, &old, [old.len()])?;
            ops::gemm_into(step, &form, &a, &b, (!bias.is_empty()).then_some(&all), &mut out)?;
            Ok(vec![Output::of("out", step.read(&out)?)])
        });
    }

    /// Compares a linear layer's epilogues and gradients.
    fn layer<S: ops::GemmElement<S>>(&mut self, [rows, inputs, outputs]: [usize; 3], numbers: Numbers, kind: &str) {
        let random = &mut self.random;
        let mut matrix = |extents: [usize; 2]| (numbers.of(random, extents[0] * extents[1]), extents);
        let [x, w, dy] = [matrix([rows, inputs]), matrix([inputs, outputs]), matrix([rows, outputs])];
        let (bias, old) = (random.normals(outputs), random.normals(inputs * outputs));
        self.compare(kind, ([rows, inputs, outputs], numbers), |step| {
            step.set_precision(Precision::Tf32);
            let [x, w, dy] = [&x, &w, &dy].map(|(values, extents)| upload::<S>(step, values, *extents));
            let (x, w, dy) = (x?, w?, dy?);
            let bias = step.upload(&bias, [outputs])?;
            let (gelu, pre) = ops::linear_gelu(step, &x, &w, Some(&bias))?;
            let (silu, _) = ops::linear_silu(step, &x, &w, None::<&Tensor<'_>>)?;
            let (gated, _) = ops::linear_swiglu(step, &x, &w, Some(&bias), &dy)?;
            let added = ops::linear_residual(step, &x, &w, Some(&bias), &dy)?;
            let mut dw = step.upload(&old, [inputs, outputs])?;
            let mut db = step.upload(&old[..outputs], [outputs])?;
            let mut dx = step.empty::<S>([rows, inputs])?;
            let of_w = ops::Gemm::new(inputs, outputs, rows).transpose_a().accumulate();
            let of_x = ops::Gemm::new(rows, inputs, outputs).transpose_b();
            ops::launch::gradients_into(
                step,
                &dy,
                Gradient { form: of_w, of: &x, into: &mut dw },
                Some(BiasGradient { into: &mut db, accumulate: true }),
                Some(Gradient { form: of_x, of: &w, into: &mut dx }),
            )?;
            let mut results = vec![];
            for (name, tensor) in
                [("gelu", &gelu), ("pre", &pre), ("silu", &silu), ("gated", &gated), ("added", &added), ("dx", &dx)]
            {
                results.push(Output::of(name, step.read(tensor)?));
            }
            results.extend([Output::of("dw", step.read(&dw)?), Output::of("db", step.read(&db)?)]);
            Ok(results)
        });
    }

    /// Compares attention and its backward pass. Scores are `sharpness` times larger.
    fn attention<S: AttentionElement>(&mut self, setup: Setup, numbers: Numbers, sharpness: f32, kind: &str) {
        let mut inputs = Inputs::new(setup);
        inputs.qkv = numbers.of(&mut self.random, inputs.qkv.len());
        inputs.dout = numbers.of(&mut self.random, inputs.dout.len());
        let Setup { batch, tokens, heads, width, .. } = setup;
        self.compare(kind, (setup, numbers, sharpness), |step| {
            step.set_precision(Precision::Tf32);
            let form = inputs.form(|mask, shape| step.upload(mask, shape))?.scale(sharpness * setup.scale());
            let qkv = step.upload(&narrow::<S>(&inputs.qkv), setup.shape())?;
            let dout = step.upload(&narrow::<S>(&inputs.dout), [batch, tokens, heads[0] * width])?;
            let made = ops::attention(step, &qkv, None, &form)?;
            let AttentionKept::Flash { lse, normal: None } = made.kept else { panic!("{:?}", made.kept) };
            let none = None::<(QkNorm<'_, '_>, &mut Tensor<'_>, bool)>;
            let dqkv = ops::launch::attention_backward(step, &qkv, none, &form, &made, &dout)?;
            Ok(vec![
                Output::of("out", step.read(&made.out)?),
                Output::of("lse", step.read(&lse)?),
                Output::of("dqkv", step.read(&dqkv)?),
            ])
        });
    }
}

fn upload<'s, S: Stored>(
    step: &EagerStep<'s>,
    values: &[f32],
    extents: impl Into<stepscope::tensor::Shape>,
) -> Result<Tensor<'s, S>> {
    step.upload(&narrow::<S>(values), extents)
}

/// A product to compare.
#[derive(Clone, Copy, Debug)]
struct Product {
    extents: [usize; 3],
    transposed: [bool; 2],
    batches: usize,
    scales: [f32; 2],
    bias: bool,
    /// The elements between rows of the operands.
    pad: usize,
    numbers: Numbers,
}

const PRODUCT: Product = Product {
    extents: [1; 3],
    transposed: [false; 2],
    batches: 1,
    scales: [1.0, 0.0],
    bias: false,
    pad: 0,
    numbers: Numbers::Normal,
};

/// Whole tiles, and extents with tails of every kind; the last two have k in several chunks.
const EXTENTS: [[usize; 3]; 8] = [
    [1, 1, 1],
    [3, 8, 5],
    [129, 130, 40],
    [128, 256, 128],
    [65, 264, 72],
    [144, 320, 136],
    [64, 128, 2048],
    [33, 35, 1057],
];

const FORMS: [[bool; 2]; 4] = [[false, false], [true, false], [false, true], [true, true]];

on_each_device! {
    /// Products of every layout, extent, epilogue and kind of number.
    fn products(device: &Device) {
        let mut comparison = Comparison::new(device);
        // The tests of each family compare the tiles of both instructions on the emulator.
        let is_gpu = comparison.is_gpu;
        for extents in if is_gpu { &EXTENTS[..] } else { &EXTENTS[..2] }.iter().copied() {
            for transposed in FORMS {
                let plain = Product { extents, transposed, ..PRODUCT };
                for call in [
                    plain,
                    Product { batches: 3, scales: [0.5, 1.0], bias: true, ..plain },
                    Product { pad: 3, scales: [0.3, -0.5], ..plain },
                ] {
                    comparison.product::<bf16, f32>(call, "product BF16 to f32");
                    comparison.product::<bf16, bf16>(call, "product BF16");
                    comparison.product::<f32, f32>(call, "product TF32");
                }
            }
        }
        for numbers in Numbers::ALL {
            for extents in if is_gpu { [[128, 128, 128], [70, 90, 136]] } else { [[16, 32, 32], [17, 19, 40]] } {
                for transposed in FORMS {
                    let call = Product { extents, transposed, numbers, ..PRODUCT };
                    comparison.product::<bf16, f32>(call, &format!("{numbers:?} BF16"));
                    comparison.product::<f32, f32>(call, &format!("{numbers:?} TF32"));
                }
            }
        }
        comparison.finish();
    }

    /// The epilogues of linear layers, and their gradients.
    fn layers(device: &Device) {
        let mut comparison = Comparison::new(device);
        let is_gpu = comparison.is_gpu;
        for extents in if is_gpu { [[128, 64, 256], [1083, 35, 67]] } else { [[64, 32, 40], [131, 35, 19]] } {
            comparison.layer::<bf16>(extents, Numbers::Normal, "layer BF16");
            comparison.layer::<f32>(extents, Numbers::Normal, "layer TF32");
        }
        for numbers in Numbers::ALL {
            let extents = if is_gpu { [70, 48, 90] } else { [20, 16, 24] };
            comparison.layer::<bf16>(extents, numbers, &format!("layer {numbers:?} BF16"));
            comparison.layer::<f32>(extents, numbers, &format!("layer {numbers:?} TF32"));
        }
        comparison.finish();
    }

    /// Attention and its gradients: every mask, head width and layout, several tiles of keys, and
    /// scores that move the running maximum.
    fn attention(device: &Device) {
        let mut comparison = Comparison::new(device);
        let is_gpu = comparison.is_gpu;
        // Three blocks of 128 keys, or two.
        let long = Setup { tokens: if is_gpu { 300 } else { 200 }, ..PLAIN };
        let widths = [32, 64, 80, 104, 128, 200, 256].map(|width| Setup { width, ..long });
        let masked = [
            Setup { sees: AttentionMask::Causal, heads: [2, 1], width: 64, ..long },
            Setup { sees: AttentionMask::Causal, masks: [true, true], width: 128, ..long },
            Setup { sees: window(100), width: 256, ..long },
        ];
        let setups = if is_gpu { [&SETUPS[..], &widths, &masked].concat() } else { masked.to_vec() };
        for (number, setup) in setups.into_iter().enumerate() {
            let sharpness = [12.0, 1.0][number % 2];
            if setup.width.is_multiple_of(8) {
                comparison.attention::<bf16>(setup, Numbers::Normal, sharpness, &format!("{} BF16", setup.width));
            }
            if setup.width <= 128 {
                comparison.attention::<f32>(setup, Numbers::Normal, sharpness, &format!("{} TF32", setup.width));
            }
        }
        for numbers in Numbers::ALL {
            for width in if is_gpu { &[64, 128, 256][..] } else { &[64] }.iter().copied() {
                let setup = Setup { width, tokens: 140, ..PLAIN };
                comparison.attention::<bf16>(setup, numbers, 1.0, &format!("{numbers:?} {width} BF16"));
            }
            if is_gpu {
                let setup = Setup { width: 64, tokens: 140, ..PLAIN };
                comparison.attention::<f32>(setup, numbers, 1.0, &format!("{numbers:?} {} TF32", setup.width));
            }
        }
        comparison.finish();
    }

    /// Products and attention of random extents and numbers.
    fn random_calls(device: &Device) {
        let mut comparison = Comparison::new(device);
        let times: usize = std::env::var(TIMES).map_or(1, |times| times.parse().expect(TIMES));
        let calls = RANDOM[usize::from(!comparison.is_gpu)];
        let [products, attentions] = calls.map(|calls| times * calls);
        for _ in 0..products {
            let random = &mut comparison.random;
            let call = Product {
                extents: [random.extent(1, 150), random.extent(1, 150), random.extent(1, 400)],
                transposed: FORMS[random.below(4) as usize],
                batches: random.extent(1, 2),
                scales: [[1.0, 0.0], [0.7, 0.3]][random.below(2) as usize],
                bias: random.below(2) == 0,
                pad: 8 * random.below(2) as usize,
                numbers: Numbers::ALL[random.below(Numbers::ALL.len() as u32) as usize],
            };
            match comparison.random.below(3) {
                0 => comparison.product::<bf16, f32>(call, "random BF16 to f32"),
                1 => comparison.product::<bf16, bf16>(call, "random BF16"),
                _ => comparison.product::<f32, f32>(call, "random TF32"),
            }
        }
        for _ in 0..attentions {
            let random = &mut comparison.random;
            let heads = [[1, 1], [2, 1], [3, 3]][random.below(3) as usize];
            let setup = Setup {
                batch: random.extent(1, 2),
                tokens: random.extent(1, 200),
                heads,
                width: 8 * random.extent(1, 32),
                stacked: heads[0] == heads[1] && random.below(2) == 0,
                sees: [AttentionMask::Full, AttentionMask::Causal, window(40)][random.below(3) as usize],
                masks: [random.below(3) == 0, random.below(3) == 0],
            };
            let sharpness = [1.0, 5.0, 40.0][random.below(3) as usize];
            if setup.width > 128 || comparison.random.below(2) == 0 {
                comparison.attention::<bf16>(setup, Numbers::Normal, sharpness, "random attention BF16");
            } else {
                comparison.attention::<f32>(setup, Numbers::Normal, sharpness, "random attention TF32");
            }
        }
        comparison.finish();
    }
}

/// Returns the product of rows with columns, `[m, k] [k, n]`, by the rule: `DEPTH` k at once.
fn by_rule<const DEPTH: usize>(a: &[f32], b: &[f32], [m, n, k]: [usize; 3]) -> Vec<u32> {
    let mut out = vec![0; m * n];
    let of_rows = |first: usize, out: &mut [u32]| {
        for (pair, out) in out.chunks_mut(2 * n).enumerate() {
            for column in (0..n).step_by(8) {
                let mut sums = [[0.0; 8]; 2];
                for p in (0..k).step_by(DEPTH) {
                    let row = |at: usize| a[(first + 2 * pair + at) * k + p..].first_chunk().expect("whole steps");
                    let columns = std::array::from_fn(|at| *b[(p + at) * n + column..].first_chunk().expect("eights"));
                    rule::add::<8, DEPTH>(&mut sums, [row(0), row(1)], &columns);
                }
                for (row, sums) in sums.into_iter().enumerate() {
                    out[row * n + column..][..8].copy_from_slice(&sums.map(canonical));
                }
            }
        }
    };
    let rows = m.div_ceil(std::thread::available_parallelism().map_or(1, usize::from)).next_multiple_of(2);
    std::thread::scope(|scope| {
        for (number, out) in out.chunks_mut(rows * n).enumerate() {
            scope.spawn(move || of_rows(number * rows, out));
        }
    });
    out
}

on_each_device! {
    /// Each instruction, against the rule: on a GPU 10^9 results of each.
    fn instructions(device: &Device) {
        let mut comparison = Comparison::new(device);
        let is_gpu = comparison.is_gpu;
        let (extent, rounds) = if is_gpu { (4096, 15) } else { (64, 9) };
        if is_gpu {
            comparison.devices.remove(0);
        }
        let extents @ [m, n, k] = [extent, extent, 64];
        for round in 0..rounds {
            let numbers = Numbers::ALL[round % Numbers::ALL.len()];
            let random = &mut comparison.random;
            let [a, b] = [m * k, k * n].map(|length| numbers.of(random, length));
            for is_bf16 in [true, false] {
                let rounded = |x: &f32| {
                    if is_bf16 { bf16::narrow(*x).widen() } else { f32::from_bits(kernels::format::round_tf32(*x)) }
                };
                let [a, b] = [&a, &b].map(|values| values.iter().map(rounded).collect::<Vec<f32>>());
                let want = if is_bf16 { by_rule::<16>(&a, &b, extents) } else { by_rule::<8>(&a, &b, extents) };
                let form = ops::Gemm::new(m, n, k);
                let kind = if is_bf16 { "instruction BF16" } else { "instruction TF32" };
                comparison.compare_with(Some(vec![Output("out", want)]), kind, numbers, |step| {
                    step.set_precision(Precision::Tf32);
                    let mut out = step.empty::<f32>([m, n])?;
                    let none = None::<&Tensor<'_>>;
                    if is_bf16 {
                        let (a, b) = (upload::<bf16>(step, &a, [m, k])?, upload::<bf16>(step, &b, [k, n])?);
                        ops::gemm_into(step, &form, &a, &b, none, &mut out)?;
                    } else {
                        let (a, b) = (step.upload(&a, [m, k])?, step.upload(&b, [k, n])?);
                        ops::gemm_into(step, &form, &a, &b, none, &mut out)?;
                    }
                    Ok(vec![Output::of("out", step.read(&out)?)])
                });
            }
        }
        comparison.finish();
    }
}
