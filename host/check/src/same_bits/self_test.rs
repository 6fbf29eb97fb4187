//! The self-test: the smallest case of every kernel against its committed digest.
//!
//! Invariant: the test ends at the first wrong kernel, and the error names it. The test waits for a
//! GPU for at most two seconds in all, and as long for a launch.

#![forbid(unsafe_code)]

use super::golden::RESULTS;
use super::{CaseSize, in_order, line, run, runs_on};
use cuda_std::launch::inventory;
use std::time::{Duration, Instant};
use stepscope_core::internals::{KernelTest, Tested, with_wait_budget};
use stepscope_core::{Device, DeviceKind, Error, Result};

/// The longest wait for a GPU. Healthy kernels take some milliseconds.
const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(2);

inventory::submit! {
    KernelTest { run: self_test, digests: || CaseSize::Smallest.golden(), results: RESULTS }
}

/// Compares every kernel's smallest case with its committed digest; see [`Device::self_test`].
fn self_test(device: &Device) -> Result<Tested> {
    device.synchronize(device.deadline())?;
    match device.description().kind {
        DeviceKind::Cuda => compare(&with_wait_budget(device, SELF_TEST_TIMEOUT), CaseSize::Smallest.golden()),
        _ => compare(device, CaseSize::Smallest.golden()),
    }
}

/// Compares every kernel's bits with those of a text of digests.
fn compare(device: &Device, golden: &str) -> Result<Tested> {
    let _span = tracing::debug_span!("self_test").entered();
    let start = Instant::now();
    let mut kernels = 0;
    for (kernel, case) in in_order().into_iter().filter(|(kernel, _)| runs_on(device, kernel)) {
        let results = run(device, &case, CaseSize::Smallest).map_err(|error| blame(device, kernel, error))?;
        let found = line(kernel, &results);
        if !golden.lines().any(|line| line == found.trim_end()) {
            return Err(wrong(
                device,
                kernel,
                format!("gives wrong bits: the digest of its results is {}", &found[..16]),
            ));
        }
        kernels += 1;
    }
    Ok(Tested { kernels, elapsed: start.elapsed() })
}

/// Turns an error in a kernel's case into one that names the kernel.
fn blame(device: &Device, kernel: &'static str, error: Error) -> Error {
    match error {
        // Other calls that take too long are no kernels: memory, for example.
        Error::Timeout { call: "launch" | "synchronize", waited, .. } => {
            let busy = if device.description().kind == DeviceKind::Cuda && waited < SELF_TEST_TIMEOUT / 2 {
                "; those before it took the rest of 2 s: do other programs keep the GPU busy?"
            } else {
                ""
            };
            wrong(device, kernel, format!("had not ended after {:.1} s{busy}", waited.as_secs_f64()))
        }
        Error::Driver { call, reason, .. } => wrong(device, kernel, format!("fails: `{call}`: {reason}")),
        Error::Kernel(fault) => wrong(device, kernel, format!("fails: {fault}")),
        other => other,
    }
}

fn wrong(device: &Device, kernel: &'static str, reason: String) -> Error {
    let description = device.description();
    let is_warpgroup = kernels::entries().any(|entry| entry.name == kernel && entry.is_warpgroup);
    let ptx = if is_warpgroup { &description.wgmma_ptx } else { &description.ptx };
    Error::Kernels { kernel, reason, device: description.name.clone(), ptx: ptx.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::same_bits::cases;

    fn kernel_of(error: &Error) -> (&'static str, &str) {
        let Error::Kernels { kernel, reason, .. } = error else { panic!("{error}") };
        (kernel, reason)
    }

    #[test]
    fn a_wrong_digest_names_its_kernel() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let golden = CaseSize::Smallest.golden();
        for kernel in ["fill_f32", "cross_entropy_f32", "mean_tokens_backward_bf16"] {
            let at = golden.find(&format!("  {kernel}\n")).unwrap() - 1;
            let mut planted = golden.to_owned();
            planted.replace_range(at..=at, if &golden[at..=at] == "0" { "1" } else { "0" });
            let error = compare(&device, &planted).unwrap_err();
            let (named, reason) = kernel_of(&error);
            assert_eq!(named, kernel);
            assert!(reason.contains("wrong bits"), "{error}");
        }
        // A kernel without a digest is not right either.
        let line = golden.lines().find(|line| line.ends_with("  fill_f32")).unwrap();
        let error = compare(&device, &golden.replace(line, "")).unwrap_err();
        assert_eq!(kernel_of(&error).0, "fill_f32");
        assert_eq!(device.lost(), None);
        assert_eq!(device.self_test().unwrap().kernels, cases().len());
    }
}
