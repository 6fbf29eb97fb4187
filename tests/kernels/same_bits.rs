//! Every kernel gives the committed bits on every device, by the cases of
//! `stepscope::check::same_bits`.
//!
//! Invariant: each kernel of the library has a case that launches it, and the library's own trace
//! lists the kernels that ran. The trials of the other modules also compare devices, over all their
//! shapes; this is the short proof.

use crate::launches::launched;
use crate::support::{self, on_each_device};
use kernels::matmul::matmul;
use kernels::matmul_mma::matmul_mma;
use std::collections::BTreeSet;
use stepscope::check::same_bits::{self, Case, CaseSize, Verdict, cases, compare, in_order, runs_on};
use stepscope::{Device, DeviceKind};

/// The runs of the cases check that each launches its kernel.
#[test]
fn every_kernel_has_a_case() {
    let mut known: BTreeSet<&str> = kernels::entries().map(|entry| entry.name).collect();
    // They do not run on the GPU, so there is nothing to compare. `matmul.rs` and `mixture.rs`
    // compare their bits with those of the other tiles.
    assert!(known.remove("matmul_on_cpu") && known.remove("matmul_grouped_on_cpu"));
    assert_eq!(
        known,
        cases().iter().map(|(name, _)| *name).collect(),
        "each kernel has a case, and each case a kernel"
    );
}

/// A kernel that hangs or is wrong must be found by its own case, so that no other kernel is
/// blamed.
#[test]
fn kernels_are_tested_before_use() {
    let device = support::open(DeviceKind::Emulated);
    let mut known = BTreeSet::new();
    for (name, case) in in_order() {
        let ran = launched(|| drop(run(&device, &case, CaseSize::Smallest)));
        assert!(known.insert(name.to_owned()), "{name} has two cases");
        assert!(ran.is_subset(&known), "the case `{name}` launches {:?}, whose own cases come later", &ran - &known);
    }
    assert_eq!(known.len(), cases().len());
}

pub(crate) fn run(device: &Device, case: &Case, form: CaseSize) -> Vec<Vec<u32>> {
    same_bits::run(device, case, form).unwrap_or_else(|error| panic!("{error}"))
}

on_each_device! {
    fn every_kernel_gives_the_committed_bits(device: &Device) {
        gives_the_committed_bits(device, CaseSize::Whole);
    }

    fn smallest_cases_give_committed_bits(device: &Device) {
        gives_the_committed_bits(device, CaseSize::Smallest);
    }
}

fn gives_the_committed_bits(device: &Device, form: CaseSize) {
    let mut text = String::new();
    for (name, case) in cases().into_iter().filter(|(name, _)| runs_on(device, name)) {
        let mut results = Vec::new();
        let ran = launched(|| results = run(device, &case, form));
        // The lines that `sanitize` counts.
        ran.iter().for_each(|kernel| println!("launch kernel={kernel:?}"));
        assert!(ran.contains(name), "the case `{name}`, {form:?}, launches only {ran:?}");
        let nans = results.iter().flatten().filter(|&&word| f32::from_bits(word).is_nan()).count();
        let words: usize = results.iter().map(Vec::len).sum();
        assert!(
            words > 0 && 4 * nans < words,
            "{name}, {form:?}: {nans} of {words} words are NaN, which checks nothing"
        );
        let line = same_bits::line(name, &results);
        // The digest shows that there is a difference; this shows its place.
        if !form.golden().contains(&line) {
            let emulated = run(&support::open(DeviceKind::Emulated), &case, form);
            difference(name, &emulated, &results).iter().for_each(|place| println!("{place}"));
        }
        text += &line;
    }
    let of_device = |line: &&str| line.split_once("  ").is_none_or(|(_, name)| runs_on(device, name));
    let golden: String = form.golden().split_inclusive('\n').filter(|line| of_device(&line.trim_end())).collect();
    let different: Vec<_> = compare(&text, &golden).into_iter().filter(|verdict| !verdict.equal()).collect();
    let right = different.is_empty() && text == golden;
    assert!(right, "digests differ; if the change is intended, run cargo xtask generate golden\n{different:#?}");
}

#[test]
fn product_tiles_give_same_bits() {
    let device = support::open(DeviceKind::Emulated);
    let on_gpu = matmul::VARIANTS.iter().filter(|(_, tile)| !tile.is_on_cpu()).map(|&(name, _)| name);
    let tf32 = matmul_mma::VARIANTS.iter().map(|&(name, _)| name);
    for (names, count) in [(on_gpu.collect::<Vec<_>>(), 5), (tf32.collect(), 4)] {
        let mut tiles = cases();
        tiles.retain(|(name, _)| names.contains(name));
        assert_eq!(tiles.len(), count);
        for (form, (name, case)) in
            CaseSize::ALL.into_iter().flat_map(|form| tiles[1..].iter().map(move |tile| (form, tile)))
        {
            assert_eq!(difference(name, &run(&device, &tiles[0].1, form), &run(&device, case, form)), None);
        }
    }
}

#[test]
fn single_ulp_difference_is_found() {
    let device = support::open(DeviceKind::Emulated);
    let ((name, case), golden) = (&cases()[0], CaseSize::Whole.golden());
    let mut results = run(&device, case, CaseSize::Whole);
    let committed = golden.lines().next().expect("a line");
    assert_eq!(same_bits::line(name, &results), format!("{committed}\n"));
    *results.last_mut().and_then(|words| words.last_mut()).expect("a result") ^= 1;
    let text = same_bits::line(name, &results) + golden.split_once('\n').expect("lines").1;
    let different: Vec<_> = compare(&text, golden).into_iter().filter(|verdict| !verdict.equal()).collect();
    assert_eq!(different.len(), 1);
    assert!(different[0].to_string().starts_with("tanh_forward_f32 "), "{}", different[0]);
    assert!(
        different[0].to_string().ends_with(&format!("DIFFERENT: golden is {}", &committed[..16])),
        "{}",
        different[0]
    );
    assert_ne!(same_bits::of_all(&text), same_bits::of_all(golden));
}

#[test]
fn unmatched_kernels_count_as_different() {
    let verdict = |name, found, golden| Verdict { name, found, golden };
    let found = compare("aa  one\nbb  two\n", "bb  two\ncc  three\n");
    assert_eq!(
        found,
        [verdict("one", Some("aa"), None), verdict("two", Some("bb"), Some("bb")), verdict("three", None, Some("cc"))]
    );
    assert_eq!(found.iter().map(Verdict::equal).collect::<Vec<_>>(), [false, true, false]);
}

/// Returns the place where the bits of a device differ from the emulator's.
fn difference(name: &str, emulated: &[Vec<u32>], device: &[Vec<u32>]) -> Option<String> {
    assert_eq!(emulated.len(), device.len());
    emulated.iter().zip(device).enumerate().find_map(|(result, (emulated, device))| {
        assert_eq!(emulated.len(), device.len());
        let at = emulated.iter().zip(device).position(|(a, b)| a != b)?;
        let count = emulated.iter().zip(device).filter(|(a, b)| a != b).count();
        let (a, b) = (emulated[at], device[at]);
        let place = format!("{name}, result {result}: element {at}");
        Some(format!("{place} is {a:#010x} emulated and {b:#010x} on the device; {count} of {} differ", device.len()))
    })
}

#[test]
fn a_difference_is_named() {
    assert_eq!(difference("op", &[vec![1, 2], vec![3]], &[vec![1, 2], vec![3]]), None);
    let message =
        difference("op", &[vec![1, 2], vec![3, 4, 5]], &[vec![1, 2], vec![3, 5, 6]]).expect("the results differ");
    assert_eq!(message, "op, result 1: element 1 is 0x00000004 emulated and 0x00000005 on the device; 2 of 3 differ");
}
