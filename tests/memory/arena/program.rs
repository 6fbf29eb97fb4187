//! The parts of random programs.

use super::{BUFFER_LEN, CAPACITY_BYTES};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// The next operation of a program. An index selects one of the live tensors.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Uploads a new tensor (in a scratch, which cannot upload, fills one with a single value).
    Upload(usize, u64),
    Fill(usize, f32),
    Copy(Index),
    Scale(Index, f32),
    Add(Index, Index),
    AddAssign(Index, Index),
    Overwrite(Index, f32),
    Save(Index),
    FromBuffer,
    ToBuffer(Index),
    /// Copies an outer tensor into a scratch.
    FromOuter(Index),
    /// Writes a scratch's tensor to an outer one.
    ToOuter(Index, Index),
    /// Makes a request that no arena can serve.
    TooLarge(usize),
    /// Uploads with a shape of another number of elements.
    WrongShape,
    /// Checks every tensor.
    Look,
    Scratch(Vec<Op>, Outcome),
}

/// The end of a scope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Outcome {
    Returns,
    Fails,
    Panics,
}

pub(super) fn outcomes() -> impl Strategy<Value = Outcome> {
    prop_oneof![3 => Just(Outcome::Returns), 1 => Just(Outcome::Fails), 1 => Just(Outcome::Panics)]
}

pub(super) fn programs(depth: u32, longest: usize) -> BoxedStrategy<Vec<Op>> {
    let index = any::<Index>;
    let length = || prop_oneof![3 => Just(BUFFER_LEN), 2 => 0usize..=130, 1 => 130usize..=1500];
    let value = || prop_oneof![Just(0.0f32), Just(-0.0), -8.0f32..8.0];
    let op = prop_oneof![
        3 => (length(), any::<u64>()).prop_map(|(len, seed)| Op::Upload(len, seed)),
        3 => (length(), value()).prop_map(|(len, value)| Op::Fill(len, value)),
        3 => index().prop_map(Op::Copy),
        3 => (index(), value()).prop_map(|(of, factor)| Op::Scale(of, factor)),
        2 => (index(), index()).prop_map(|(a, b)| Op::Add(a, b)),
        2 => (index(), index()).prop_map(|(out, a)| Op::AddAssign(out, a)),
        2 => (index(), value()).prop_map(|(out, value)| Op::Overwrite(out, value)),
        3 => index().prop_map(Op::Save),
        1 => Just(Op::FromBuffer),
        2 => index().prop_map(Op::ToBuffer),
        2 => index().prop_map(Op::FromOuter),
        2 => (index(), index()).prop_map(|(out, a)| Op::ToOuter(out, a)),
        1 => prop_oneof![Just(CAPACITY_BYTES / 4 + 1), Just(usize::MAX / 4), Just(usize::MAX)].prop_map(Op::TooLarge),
        1 => Just(Op::WrongShape),
        1 => Just(Op::Look),
    ];
    if depth == 0 {
        return vec(op, 0..longest).boxed();
    }
    let scratch = (programs(depth - 1, longest / 2), outcomes()).prop_map(|(ops, outcome)| Op::Scratch(ops, outcome));
    vec(prop_oneof![8 => op, 1 => scratch], 0..longest).boxed()
}
