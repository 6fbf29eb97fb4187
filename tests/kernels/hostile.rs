//! Arguments of any size keep a kernel inside its buffers: the products and sums in contracts do
//! not wrap.
//!
//! Every kernel of the library is launched with small honest buffers while one or two of its
//! numbers are hostile. They are near powers of two, near `usize::MAX`, or such that their products
//! wrap to the length of a buffer. The contract must refuse each launch, or the launch must stay
//! inside its arguments, which the emulator's race mode checks. In builds with overflow checks, a
//! contract or kernel that wraps panics, and a panic is not a refusal. `cargo xtask long` also runs
//! these tests in a release build, where wrapping does not panic.
//!
//! Alignment is attacked too. Every buffer begins one to three elements late. Every number is one
//! to three larger, and the buffers get the lengths that the contract then requires. On a GPU, a
//! misaligned vector access would end the process's context. The emulator reports it, so such a
//! launch must be refused or be right.

use cuda_std::emulator::Mode;
use cuda_std::launch::{Pod, inventory};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use stepscope::{Arena, Capacity, Device, DeviceKind, EagerStep, Error, Result};
use stepscope_core::internals::choose_number;

/// A numeric parameter of a kernel.
struct Number {
    name: &'static str,
    honest: u64,
    /// The largest value of its type.
    most: u64,
}

/// A buffer's name and its honest number of elements. Its allocation is larger.
struct Length {
    name: &'static str,
    honest: usize,
}

/// Returns the elements to allocate for a buffer of `honest` elements, so that a view may begin
/// late or be longer.
pub(crate) fn room(honest: usize) -> usize {
    4 * honest + 64
}

/// The elements of the buffers that a launch gets.
#[derive(Clone, Default)]
struct Views {
    /// A buffer, and the number of elements by which it begins late.
    late: Option<(&'static str, usize)>,
    /// The buffers whose length is not the honest one.
    lengths: BTreeMap<&'static str, usize>,
}

/// The numbers of a launch, in the order of the parameters, and its views of the buffers.
pub(crate) struct Numbers<'n> {
    hostile: [Option<(usize, u64)>; 2],
    known: &'n mut Vec<Number>,
    next: usize,
    views: &'n Views,
    buffers: &'n mut Vec<Length>,
}

impl Numbers<'_> {
    /// Returns the range of a buffer, allocated with [`room`], that the launch gets.
    pub(crate) fn view(&mut self, name: &'static str, honest: usize) -> Range<usize> {
        if self.buffers.iter().all(|buffer| buffer.name != name) {
            self.buffers.push(Length { name, honest });
        }
        let start = self.views.late.filter(|(late, _)| *late == name).map_or(0, |(_, elements)| elements);
        start..start + self.views.lengths.get(name).copied().unwrap_or(honest)
    }

    /// Returns the launch's next numeric parameter.
    pub(crate) fn next<N: Pod>(&mut self, name: &'static str, honest: N) -> N {
        choose_number(honest, |honest, most| self.next_word(name, honest, most))
    }

    /// Returns the launch's next numeric parameter as a word; `most` is the largest value of its
    /// type.
    pub(crate) fn next_word(&mut self, name: &'static str, honest: u64, most: u64) -> u64 {
        let at = self.next;
        self.next += 1;
        if self.known.len() == at {
            self.known.push(Number { name, honest, most });
        }
        let chosen = self.hostile.iter().flatten().find(|(number, _)| *number == at);
        chosen.map_or(honest, |(_, word)| *word)
    }
}

/// Returns the hostile values of a number, for buffers of `lengths` elements.
fn hostile(&Number { honest, most, .. }: &Number, lengths: &[u64]) -> Vec<u64> {
    let mut words = vec![0, 1, 2, 3, honest.wrapping_sub(1), honest + 1, honest << 1];
    words.extend(
        [31, 32, 58, 59, 60, 61, 62, 63].into_iter().flat_map(|bit| [1 << bit, (1 << bit) + 1, (1 << bit) + honest]),
    );
    words.extend([u64::from(u32::MAX), u64::from(u32::MAX - 1), u64::MAX, u64::MAX - 1, u64::MAX.wrapping_sub(honest)]);
    words.extend(u64::MAX.checked_div(honest).into_iter().flat_map(|most| [most, most.wrapping_add(1)]));
    // Three times this is a length, modulo 2^64.
    words.extend(lengths.iter().map(|length| length.wrapping_mul(0xaaaa_aaaa_aaaa_aaab)));
    let words: BTreeSet<u64> = words.into_iter().map(|word| word & most).filter(|word| *word != honest).collect();
    words.into_iter().collect()
}

/// The number of accepted hostile values above which a number is free, or not checked by the
/// contract.
const FEW: usize = 6;

/// Returns all values if there are few, otherwise the least and the largest, which distinguish the
/// two cases.
fn telling(values: &[u64]) -> Vec<u64> {
    match values {
        [least, .., largest] if values.len() > FEW => vec![*least, *largest],
        few => few.to_vec(),
    }
}

/// Launches a kernel with honest numbers, with each number hostile, and with pairs of hostile
/// numbers. Pairs are tried where the contract accepts both but not each by itself, as it would if
/// their product wrapped. `run` checks the contract, and launches on request. Without `pairs` only
/// one number is hostile at a time: the variants of a family share one contract, so the first and
/// the last stand for all.
pub(crate) fn hostile_launches(
    kernel: &'static str,
    lengths: &[u64],
    pairs: bool,
    run: &mut dyn FnMut(&mut Numbers<'_>, bool) -> Result<()>,
) {
    let mut known = Vec::new();
    misaligned_launches(kernel, run);
    let views = Views::default();
    let mut accepted = |hostile, known: &mut Vec<Number>, launch| {
        let buffers = &mut Vec::new();
        let outcome =
            Mode::RACES.scope(|| run(&mut Numbers { hostile, known, next: 0, views: &views, buffers }, launch));
        let choice = || hostile.iter().flatten().map(|&(at, word)| (known[at].name, word)).collect::<Vec<_>>();
        let refused = matches!(outcome, Err(Error::Contract { .. }));
        assert!(refused || outcome.is_ok(), "{kernel}, with {:?}: {outcome:?}", choice());
        !refused
    };
    assert!(accepted([None; 2], &mut known, true), "{kernel}: the valid launch is refused");
    // For each number, the values that are refused by themselves, and of the others the values from
    // `telling`.
    let mut alone: Vec<[Vec<u64>; 2]> = Vec::new();
    for at in 0..known.len() {
        let words = hostile(&known[at], lengths).into_iter();
        let (good, bad): (Vec<u64>, Vec<u64>) =
            words.partition(|word| accepted([Some((at, *word)), None], &mut known, false));
        let good = telling(&good);
        good.iter().for_each(|word| assert!(accepted([Some((at, *word)), None], &mut known, true)));
        alone.push([bad, good]);
    }
    for (at, [bad, good]) in alone.iter().enumerate().filter(|_| pairs) {
        for (other, [bad_with, good_with]) in alone[..at].iter().enumerate() {
            for (words, with) in [(bad, bad_with), (bad, good_with), (good, bad_with)] {
                for with in with {
                    let pair = |word| [Some((at, word)), Some((other, *with))];
                    let both: Vec<u64> =
                        words.iter().copied().filter(|&word| accepted(pair(word), &mut known, false)).collect();
                    for word in telling(&both) {
                        accepted(pair(word), &mut known, true);
                    }
                }
            }
        }
    }
}

/// Launches with buffers that begin late, and with numbers that are one to three off and buffers of
/// the matching lengths. Each launch must be refused or run without a fault, with race checks and
/// without.
fn misaligned_launches(kernel: &'static str, run: &mut dyn FnMut(&mut Numbers<'_>, bool) -> Result<()>) {
    let (mut known, mut buffers) = (Vec::new(), Vec::new());
    let mut outcome = |hostile, views: &Views, launch| {
        let mut numbers = Numbers { hostile, known: &mut known, next: 0, views, buffers: &mut buffers };
        let outcome = run(&mut numbers, launch);
        let refusal = match outcome {
            Ok(()) => None,
            Err(Error::Contract { violation, .. }) => Some(violation),
            Err(other) => {
                panic!(
                    "{kernel}, with {hostile:?}, views {:?} elements late and {:?} long: {other}",
                    views.late, views.lengths
                )
            }
        };
        let words = numbers.known.iter().map(|number| number.honest).collect();
        (refusal, words, numbers.buffers.iter().map(|buffer| (buffer.name, buffer.honest)).collect())
    };
    let honest = Views::default();
    let (refusal, words, buffers): (_, Vec<u64>, Vec<(&'static str, usize)>) = outcome([None; 2], &honest, true);
    assert_eq!(refusal, None, "{kernel}: the valid launch is refused");
    for &(name, _) in &buffers {
        for late in 1..=3 {
            outcome([None; 2], &Views { late: Some((name, late)), ..Views::default() }, true);
        }
    }
    for (at, honest) in words.iter().enumerate() {
        for off in 1..=3 {
            let mut views = Views::default();
            let hostile = |off: u64| [Some((at, off)), None];
            // Few contracts check the length of more buffers than these.
            for _ in 0..16 {
                let word = honest.wrapping_add(off);
                let (refusal, ..) = outcome(hostile(word), &views, false);
                let Some(refusal) = refusal else {
                    for mode in [Mode::RACES, Mode { races: false, shuffle: None }] {
                        let (refusal, ..) = mode.scope(|| outcome(hostile(word), &views, true));
                        assert_eq!(refusal, None, "{kernel}");
                    }
                    break;
                };
                let Some(&(name, honest)) = buffers.iter().find(|(name, _)| *name == refusal.argument) else { break };
                let length = views.lengths.get(name).copied().unwrap_or(honest);
                let wanted = wanted_length(&refusal.expected, length);
                if wanted == length || wanted > room(honest) - 3 {
                    break;
                }
                views.lengths.insert(name, wanted);
            }
        }
    }
}

/// Returns the length that a contract requires in this error, for a buffer of another length.
fn wanted_length(expected: &str, length: usize) -> usize {
    let number = |text: &str| text.parse::<usize>().ok();
    if let Some(elements) = expected.strip_suffix(" elements") {
        if let Some(exact) = number(elements) {
            return exact;
        }
        if let Some(multiple) = elements.strip_prefix("a multiple of cols = ").and_then(number) {
            return length.next_multiple_of(multiple.max(1));
        }
    }
    // An error that names a minimum in other words.
    length + length.max(1)
}

/// The names of the kernels that an [`attack!`] or the table of declared ops covers.
pub(crate) struct Attacked(pub(crate) fn() -> Vec<&'static str>);

inventory::collect!(Attacked);

/// Returns the names of all kernels that are attacked in this program.
pub(crate) fn attacked() -> BTreeSet<&'static str> {
    inventory::iter::<Attacked>.into_iter().flat_map(|attacked| attacked.0()).collect()
}

/// Runs launches in a step of the emulator.
pub(crate) fn emulated(launches: impl for<'s> FnOnce(&EagerStep<'s>) -> Result<()>) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(8)).build().unwrap();
    arena.step(|step| launches(step)).unwrap();
}

/// Attacks kernels, in a module `contracts`. Each parameter's name is followed by its kind. A
/// buffer is read (`f32s`, `u32s`), read by a pointer (`pointer`, `pointer_u32`) or written (`out`,
/// `out_u32`). BF16 buffers are `halves` and `out_halves`, by their elements, or a tensor `map`, by
/// elements, extents, strides and the rows of a box. Scalars are a `number` or a `float`, and an
/// `array` has numbers. A family
/// `kernel<S>` is attacked with both types; its buffers of S are `stored` and `out_stored`.
macro_rules! attack {
    ($($file:ident :: $kernel:ident $(by $choice:ident)? $(<$S:ident>)? { $($name:ident: $kind:ident $value:expr),* $(,)? })*) => {
        mod contracts {
            use super::*;
            #[allow(unused_imports)]
            use cuda_std::launch::Contract as _;
            #[allow(unused_imports)]
            use stepscope::tensor::{Source as _, Target as _};

            fn names() -> Vec<&'static str> {
                let mut names = Vec::new();
                $(names.extend(attack!(@variants $file $kernel $($choice)? $(<$S>)?).map(|(name, _)| name));)*
                names
            }

            cuda_std::launch::inventory::submit! { $crate::hostile::Attacked(names) }

            $(#[test]
            fn $kernel() {
                attack!(@types [$($S)?] {
                    $crate::hostile::emulated(|step| {
                        let mut lengths: Vec<u64> = Vec::new();
                        let choices: Vec<_> = attack!(@choices $file $kernel $($choice)? $(<$S>)?).collect();
                        // No variant has this type.
                        if choices.is_empty() {
                            return Ok(());
                        }
                        // A value may depend on the variant, but not the length of a buffer.
                        $(#[allow(unused_variables)] let $choice = choices[0].1;)?
                        $(attack!(@make step, lengths, $name, $kind, $value);)*
                        for (number, &(name, _choice)) in choices.iter().enumerate() {
                            $(#[allow(unused_variables)] let $choice = _choice;)?
                            let pairs = number == 0 || number + 1 == choices.len();
                            $crate::hostile::hostile_launches(name, &lengths, pairs, &mut |numbers, launch| {
                                let _ = &numbers;
                                let kernel = kernels::$file::$kernel {
                                    $($choice,)?
                                    $($name: attack!(@argument numbers, $name, $kind, $value)),*
                                };
                                match kernel.grid() {
                                    Ok(_) if !launch => Ok(()),
                                    _ => step.launch(kernel),
                                }
                            });
                        }
                        Ok(())
                    });
                });
            })*
        }
    };
    (@types [] $body:block) => { $body };
    (@types [$S:ident] $body:block) => {{
        { type $S = f32; $body }
        { type $S = stepscope::bf16; $body }
    }};
    (@choices $file:ident $family:ident <$S:ident>) => { [(stringify!($family), ())].into_iter() };
    (@choices $file:ident $family:ident $choice:ident <$S:ident>) => {
        kernels::$file::$family::<'_, f32>::VARIANTS
            .iter()
            .filter(|(_, _, stored)| *stored == <S as stepscope::tensor::Element>::NAME)
            .map(|&(name, choice, _)| (name, choice))
    };
    (@choices $($of:ident)*) => { attack!(@variants $($of)*) };
    (@variants $file:ident $family:ident $choice:ident <$S:ident>) => {
        kernels::$file::$family::<'_, f32>::VARIANTS.iter().map(|&(name, _, _)| (name, ()))
    };
    (@variants $file:ident $family:ident <$S:ident>) => {
        [(concat!(stringify!($family), "_f32"), ()), (concat!(stringify!($family), "_bf16"), ())].into_iter()
    };
    (@variants $file:ident $kernel:ident) => { [(stringify!($kernel), ())].into_iter() };
    (@variants $file:ident $family:ident $choice:ident) => { kernels::$file::$family::VARIANTS.iter().copied() };
    (@make $step:ident, $lengths:ident, $name:ident, f32s, $length:expr) => {
        let $name = $step.upload(&vec![1.0_f32; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, stored, $length:expr) => {
        let $name = $step.upload(&vec![<S as kernels::stored::Stored>::narrow(1.0); $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out_stored, $length:expr) => {
        let mut $name = $step.upload(&vec![<S as kernels::stored::Stored>::narrow(1.0); $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, stored_pointer, $length:expr) => {
        attack!(@make $step, $lengths, $name, stored, $length);
    };
    (@make $step:ident, $lengths:ident, $name:ident, pointer, $length:expr) => {
        attack!(@make $step, $lengths, $name, f32s, $length);
    };
    (@make $step:ident, $lengths:ident, $name:ident, pointer_u32, $length:expr) => {
        attack!(@make $step, $lengths, $name, u32s, $length);
    };
    (@make $step:ident, $lengths:ident, $name:ident, u32s, $length:expr) => {
        let $name = $step.upload(&vec![0_u32; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out, $length:expr) => {
        let mut $name = $step.upload(&vec![1.0_f32; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, halves, $length:expr) => {
        let $name = $step.upload(&vec![stepscope::bf16::ONE; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, map, $map:expr) => {
        attack!(@make $step, $lengths, $name, halves, $map.0);
    };
    (@make $step:ident, $lengths:ident, $name:ident, f32_map, $map:expr) => {
        attack!(@make $step, $lengths, $name, f32s, $map.0);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out_halves, $length:expr) => {
        let mut $name = $step.upload(&vec![stepscope::bf16::ONE; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, out_u32, $length:expr) => {
        let mut $name = $step.upload(&vec![0_u32; $crate::hostile::room($length)], [$crate::hostile::room($length)])?;
        $lengths.push($length as u64);
    };
    (@make $step:ident, $lengths:ident, $name:ident, $number:ident, $value:expr) => {};
    (@argument $numbers:ident, $name:ident, f32s, $length:expr) => { $name.slice().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, stored_pointer, $length:expr) => { $name.pointer().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, stored, $length:expr) => { $name.slice().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, out_stored, $length:expr) => { $name.out().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, halves, $length:expr) => { $name.slice().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, map, $map:expr) => {{
        let (length, extents, strides, box_rows) = $map;
        let memory = $name.slice().part($numbers.view(stringify!($name), length));
        let extents: [u32; 3] = extents.map(|extent| $numbers.next(concat!(stringify!($name), " extents"), extent));
        let strides: [usize; 2] = strides.map(|stride| $numbers.next(concat!(stringify!($name), " strides"), stride));
        let box_rows = $numbers.next(concat!(stringify!($name), " box_rows"), box_rows);
        cuda_std::launch::TensorMap { memory, extents, strides, box_rows }
    }};
    (@argument $numbers:ident, $name:ident, f32_map, $map:expr) => { attack!(@argument $numbers, $name, map, $map) };
    (@argument $numbers:ident, $name:ident, out_halves, $length:expr) => { $name.out().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, u32s, $length:expr) => { $name.slice().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, pointer, $length:expr) => { $name.pointer().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, pointer_u32, $length:expr) => { $name.pointer().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, out, $length:expr) => { $name.out().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, out_u32, $length:expr) => { $name.out().part($numbers.view(stringify!($name), $length)) };
    (@argument $numbers:ident, $name:ident, array, $value:expr) => { $value.map(|word| $numbers.next(stringify!($name), word)) };
    (@argument $numbers:ident, $name:ident, qkv, $value:expr) => {{
        let [tokens, heads, kv_heads, width, stacked]: [u32; 5] = $value;
        kernels::qkv_layout::QkvLayout {
            tokens: $numbers.next("tokens", tokens),
            heads: $numbers.next("heads", heads),
            kv_heads: $numbers.next("kv_heads", kv_heads),
            width: $numbers.next("width", width),
            stacked: $numbers.next("stacked", stacked),
        }
    }};
    (@argument $numbers:ident, $name:ident, product, $value:expr) => {{
        let [m, n, k, k_per_split, batches]: [u32; 5] = $value;
        kernels::matmul::ProductExtents {
            m: $numbers.next("m", m),
            n: $numbers.next("n", n),
            k: $numbers.next("k", k),
            k_per_split: $numbers.next("k_per_split", k_per_split),
            batches: $numbers.next("batches", batches),
        }
    }};
    (@argument $numbers:ident, $name:ident, epilogue, $value:expr) => {{
        let ([stride_c, stride_bias], ldc, [alpha, beta], flags): ([usize; 2], u32, [f32; 2], u32) = $value;
        kernels::matmul::EpilogueForm {
            stride_c: $numbers.next("stride_c", stride_c),
            stride_bias: $numbers.next("stride_bias", stride_bias),
            ldc: $numbers.next("ldc", ldc),
            alpha,
            beta,
            flags: $numbers.next("flags", flags),
        }
    }};
    (@argument $numbers:ident, $name:ident, frequencies, $value:expr) => {{
        let ([start, ratio, shrink, low, span, inverse], [shift, by_pair]): ([u64; 6], [u32; 2]) = $value;
        kernels::rotary::Frequencies {
            start: $numbers.next("start", start),
            ratio: $numbers.next("ratio", ratio),
            shrink: $numbers.next("shrink", shrink),
            low: $numbers.next("low", low),
            span: $numbers.next("span", span),
            inverse: $numbers.next("inverse", inverse),
            shift: $numbers.next("shift", shift),
            by_pair: $numbers.next("by_pair", by_pair),
        }
    }};
    (@argument $numbers:ident, $name:ident, number, $value:expr) => { $numbers.next(stringify!($name), $value) };
    (@argument $numbers:ident, $name:ident, float, $value:expr) => { $value };
}
pub(crate) use attack;
