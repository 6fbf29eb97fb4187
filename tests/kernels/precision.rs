//! The kernels that round operands of a multiply. Each element is rounded to TF32 or BF16 and
//! written to its place in a fragment, with zeros around.

use crate::hostile::attack;
use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{Trial, assert_refused, trial};
use kernels::format::Reduced;
use kernels::mma::Side;
use kernels::precision::{Rounding, round};
use stepscope::ops::Precision;
use stepscope::{Result, Source, Target};

const PRECISIONS: [Precision; 2] = [Precision::Tf32, Precision::Bf16];

/// `batches` of `rows` x `cols` elements without gaps, and the sides for which fragments are
/// needed: untransposed and transposed.
#[derive(Clone, Copy, Debug)]
struct Form {
    rows: usize,
    cols: usize,
    batches: usize,
    along: Option<Side>,
    across: Option<Side>,
}

/// Rounds `x` with integers. It rounds up if the dropped part is more than half, or exactly half:
/// always for TF32, and after an odd bit for BF16.
fn rounded(precision: Precision, x: f32) -> u32 {
    let dropped = if precision == Precision::Tf32 { 13 } else { 16 };
    let (kept, rest, half) = (x.to_bits() >> dropped, x.to_bits() & ((1 << dropped) - 1), 1 << (dropped - 1));
    let tie_goes_up = precision == Precision::Tf32 || kept & 1 == 1;
    (kept + u32::from(rest > half || (rest == half && tie_goes_up))) << dropped
}

fn per_word(precision: Precision) -> usize {
    if precision == Precision::Tf32 { 1 } else { 2 }
}

/// Returns the words of the fragments of these rows of k elements.
fn words(precision: Precision, [rows, k]: [usize; 2]) -> usize {
    rows.div_ceil(32) * k.div_ceil(8 * per_word(precision)) * 256
}

impl Form {
    /// Returns the words of its fragments, untransposed and transposed.
    fn words(self, precision: Precision) -> [usize; 2] {
        let Self { rows, cols, batches, along, across } = self;
        [(along, [rows, cols]), (across, [cols, rows])]
            .map(|(side, extents)| side.map_or(0, |_| batches * words(precision, extents)))
    }

    /// Returns the kernel's expected result for `x`, element by element, untransposed and
    /// transposed.
    fn expected(self, precision: Precision, x: &[f32]) -> [Vec<u32>; 2] {
        let Self { rows, cols, batches, along, across } = self;
        let (per_word, mut made) = (per_word(precision), self.words(precision).map(|words| vec![0; words]));
        for (at, bits) in x.iter().map(|&x| rounded(precision, x)).enumerate() {
            let (batch, [row, col]) = (at / (rows * cols), [at / cols % rows, at % cols]);
            assert!(batch < batches);
            let [as_it_lies, transposed] = &mut made;
            for (made, side, [row, p], extents) in
                [(as_it_lies, along, [row, col], [rows, cols]), (transposed, across, [col, row], [cols, rows])]
            {
                let Some(side) = side else { continue };
                let (word, part) = (p / per_word, p % per_word);
                // For B, neighbouring groups of four lanes hold columns that are 16 apart.
                let group = if side == Side::Left { row % 32 / 4 } else { row % 16 / 4 * 2 + row % 32 / 16 };
                let fragment = row / 32 * extents[1].div_ceil(8 * per_word) + word / 8;
                let [upper, later] = [row % 2, word % 2];
                let in_quad = if side == Side::Left { 2 * later + upper } else { 2 * upper + later };
                let at = fragment * 256 + row % 4 / 2 * 128 + (4 * group + word % 8 / 2) * 4 + in_quad;
                made[batch * words(precision, extents) + at] |=
                    if precision == Precision::Tf32 { bits } else { bits >> (16 - 16 * part) };
            }
        }
        made
    }
}

/// Runs the kernel on three operands, with `words` for the fragments of each.
fn round(
    trial: &Trial<'_, '_>,
    precision: Precision,
    operands: [(Form, &[f32]); 3],
    words: [[usize; 2]; 3],
) -> Result<[[Vec<u32>; 2]; 3]> {
    let [(_, a), (_, b), (_, c)] = operands;
    let values = [trial.upload(a, [a.len()])?, trial.upload(b, [b.len()])?, trial.upload(c, [c.len()])?];
    let mut made = Vec::new();
    for [along, across] in words {
        made.push([trial.empty::<u32>([along])?, trial.empty::<u32>([across])?]);
    }
    let mut outputs = made.iter_mut().zip(&values);
    let launch = operands.map(|(Form { rows, cols, batches, along, across }, _)| {
        let ([as_it_lies, transposed], values) = outputs.next().expect("three");
        Rounding {
            values: Some(values.slice()),
            rows,
            cols,
            ld: cols,
            batches,
            stride: rows * cols,
            along: along.map(|side| (side, as_it_lies.out())),
            across: across.map(|side| (side, transposed.out())),
        }
    });
    let format = if precision == Precision::Tf32 { Reduced::Tf32 } else { Reduced::Bf16 };
    trial.launch(round::of(format, launch))?;
    let mut read = Vec::new();
    for [along, across] in &made {
        read.push([trial.output(along)?, trial.output(across)?]);
    }
    Ok(read.try_into().expect("three"))
}

const NOTHING: (Form, &[f32]) = (Form { rows: 0, cols: 0, batches: 0, along: None, across: None }, &[]);

on_each_device! {
    fn elements_are_rounded_into_fragments(device: &Device) {
        let sides = [None, Some(Side::Left), Some(Side::Right)];
        let extents = [[1, 1], [3, 8], [5, 7], [2, 193], [33, 64], [0, 5], [4, 0], [300, 12], [65, 129], [130, 33], [31, 16]];
        let mut turn = 0;
        let mut form = || {
            let [rows, cols] = extents[turn % extents.len()];
            let (along, across) = (sides[turn % 3], sides[turn / 3 % 3]);
            turn += 1;
            let form = Form { rows, cols, batches: 1 + turn % 2, along, across };
            let mut x = Random::new(turn as u64).normals(form.batches * rows * cols);
            x.iter_mut().zip(SPECIAL.into_iter().filter(|special| !special.is_nan())).for_each(|(x, special)| *x = special);
            (form, x)
        };
        // The number of extents times sides, three in a launch.
        for _ in 0..33 {
            let operands = [form(), form(), form()];
            let operands = operands.each_ref().map(|(form, x)| (*form, &**x));
            for precision in PRECISIONS {
                let words = operands.map(|(form, _)| form.words(precision));
                let got = trial(device, |trial| round(trial, precision, operands, words));
                for ((form, x), got) in operands.into_iter().zip(&got) {
                    let want = form.expected(precision, x);
                    for (got, want) in got.iter().zip(&want) {
                        let different = got.iter().zip(want).position(|(got, want)| got != want);
                        assert_eq!(different, None, "{precision}, {form:?}: first at this word");
                        assert_eq!(got.len(), want.len());
                    }
                }
            }
        }
    }

    fn nan_stays_nan_in_bf16(device: &Device) {
        let nans = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0xffc0_0000, 0x7fc0_0000, 0x7f80_ffff, 0xff80_0001, 0x7fa0_0000];
        let form = Form { rows: 1, cols: 8, batches: 1, along: Some(Side::Right), across: None };
        let nans = nans.map(f32::from_bits);
        let operands = [(form, &nans[..]), NOTHING, NOTHING];
        let [[got, _], ..] =
            trial(device, |trial| round(trial, Precision::Bf16, operands, operands.map(|(form, _)| form.words(Precision::Bf16))));
        let found = got.iter().flat_map(|word| [word << 16, word & 0xffff_0000]).filter(|&bits| f32::from_bits(bits).is_nan());
        assert_eq!(found.count(), nans.len());
    }

    fn too_little_room_is_refused(device: &Device) {
        let form = Form { rows: 33, cols: 9, batches: 1, along: Some(Side::Left), across: Some(Side::Left) };
        let x = [0.0; 33 * 9];
        trial(device, |trial| {
            for precision in PRECISIONS {
                for (place, name) in [(0, "b_along"), (1, "b_across")] {
                    let mut words = form.words(precision);
                    words[place] -= 256;
                    let operands = [NOTHING, (form, &x[..]), NOTHING];
                    let refused = trial.with_scratch(|| Ok(round(trial, precision, operands, [[0; 2], words, [0; 2]])))?;
                    assert_refused(refused, &[name, &words[place].to_string()]);
                }
            }
            Ok(())
        });
    }
}

/// The words of the fragments of one matrix of up to 32 rows and eight k.
const WORDS: usize = kernels::mma::FRAGMENT as usize;

// Products: two batches of `[5, 7] [7, 6]`.
attack! {
    precision::round by format {
        a: f32s 70, a_along: out_u32 2 * WORDS, a_across: out_u32 2 * WORDS, a_rows: number 5, a_cols: number 7,
        a_ld: number 7, a_batches: number 2, a_stride: number 35,
        b: f32s 84, b_along: out_u32 2 * WORDS, b_across: out_u32 2 * WORDS, b_rows: number 7, b_cols: number 6,
        b_ld: number 6, b_batches: number 2, b_stride: number 42,
        c: f32s 60, c_along: out_u32 2 * WORDS, c_across: out_u32 2 * WORDS, c_rows: number 5, c_cols: number 6,
        c_ld: number 6, c_batches: number 2, c_stride: number 30, sides: number 0x999,
    }
}
