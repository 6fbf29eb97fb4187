//! The kernel that rounds operands of a multiply. Each element is rounded to TF32 and written
//! to its place in a fragment, with zeros around.

use crate::hostile::attack;
use crate::support::{Random, SPECIAL, on_each_device};
use crate::trial::{Trial, assert_refused, trial};
use kernels::mma::Side;
use kernels::precision::{Rounding, round_to_tf32};
use stepscope::Result;
use stepscope::tensor::{Source, Target};

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

/// Rounds `x` with integers: to the nearer neighbor, or to the even one of two that are as near.
fn rounded(x: f32) -> u32 {
    let (below, dropped) = (x.to_bits() >> 13, x.to_bits() % (1 << 13));
    let is_up = dropped > 1 << 12 || (dropped == 1 << 12 && below % 2 == 1);
    (below + u32::from(is_up)) << 13
}

/// Returns the words of the fragments of these rows of k elements.
fn words([rows, k]: [usize; 2]) -> usize {
    rows.div_ceil(32) * k.div_ceil(8) * 256
}

impl Form {
    /// Returns the words of its fragments, untransposed and transposed.
    fn words(self) -> [usize; 2] {
        let Self { rows, cols, batches, along, across } = self;
        [(along, [rows, cols]), (across, [cols, rows])]
            .map(|(side, extents)| side.map_or(0, |_| batches * words(extents)))
    }

    /// Returns the kernel's expected result for `x`, element by element, untransposed and
    /// transposed.
    fn expected(self, x: &[f32]) -> [Vec<u32>; 2] {
        let Self { rows, cols, batches, along, across } = self;
        let mut made = self.words().map(|words| vec![0; words]);
        for (at, bits) in x.iter().map(|&x| rounded(x)).enumerate() {
            let (batch, [row, col]) = (at / (rows * cols), [at / cols % rows, at % cols]);
            assert!(batch < batches);
            let [as_it_lies, transposed] = &mut made;
            for (made, side, [row, p], extents) in
                [(as_it_lies, along, [row, col], [rows, cols]), (transposed, across, [col, row], [cols, rows])]
            {
                let Some(side) = side else { continue };
                // For B, neighbouring groups of four lanes hold columns that are 16 apart.
                let group = if side == Side::Left { row % 32 / 4 } else { row % 16 / 4 * 2 + row % 32 / 16 };
                let fragment = row / 32 * extents[1].div_ceil(8) + p / 8;
                let [upper, later] = [row % 2, p % 2];
                let in_quad = if side == Side::Left { 2 * later + upper } else { 2 * upper + later };
                let at = fragment * 256 + row % 4 / 2 * 128 + (4 * group + p % 8 / 2) * 4 + in_quad;
                made[batch * words(extents) + at] = bits;
            }
        }
        made
    }
}

/// Runs the kernel on three operands, with `words` for the fragments of each.
fn round(trial: &Trial<'_, '_>, operands: [(Form, &[f32]); 3], words: [[usize; 2]; 3]) -> Result<[[Vec<u32>; 2]; 3]> {
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
    trial.launch(round_to_tf32::of(launch))?;
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
            let words = operands.map(|(form, _)| form.words());
            let got = trial(device, |trial| round(trial, operands, words));
            for ((form, x), got) in operands.into_iter().zip(&got) {
                let want = form.expected(x);
                for (got, want) in got.iter().zip(&want) {
                    let different = got.iter().zip(want).position(|(got, want)| got != want);
                    assert_eq!(different, None, "{form:?}: differs from this word on");
                    assert_eq!(got.len(), want.len());
                }
            }
        }
    }

    fn too_little_room_is_refused(device: &Device) {
        let form = Form { rows: 33, cols: 9, batches: 1, along: Some(Side::Left), across: Some(Side::Left) };
        let x = [0.0; 33 * 9];
        trial(device, |trial| {
            for (place, name) in [(0, "b_along"), (1, "b_across")] {
                let mut words = form.words();
                words[place] -= 256;
                let operands = [NOTHING, (form, &x[..]), NOTHING];
                let refused = trial.with_scratch(|| Ok(round(trial, operands, [[0; 2], words, [0; 2]])))?;
                assert_refused(refused, &[name, &words[place].to_string()]);
            }
            Ok(())
        });
    }
}

/// The words of the fragments of one matrix of up to 32 rows and eight k.
const WORDS: usize = kernels::mma::FRAGMENT as usize;

// Products: two batches of `[5, 7] [7, 6]`.
attack! {
    precision::round_to_tf32 {
        a: f32s 70, a_along: out_u32 2 * WORDS, a_across: out_u32 2 * WORDS, a_rows: number 5, a_cols: number 7,
        a_ld: number 7, a_batches: number 2, a_stride: number 35,
        b: f32s 84, b_along: out_u32 2 * WORDS, b_across: out_u32 2 * WORDS, b_rows: number 7, b_cols: number 6,
        b_ld: number 6, b_batches: number 2, b_stride: number 42,
        c: f32s 60, c_along: out_u32 2 * WORDS, c_across: out_u32 2 * WORDS, c_rows: number 5, c_cols: number 6,
        c_ld: number 6, c_batches: number 2, c_stride: number 30, sides: number 0x999,
    }
}
