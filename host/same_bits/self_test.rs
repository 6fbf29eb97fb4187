//! The self-test: the smallest case of every kernel against its committed digest.
//!
//! Invariant: the first kernel that is not right ends it, and the error names that kernel. A GPU is waited for two seconds at most in
//! all, and as long for a launch.

#![forbid(unsafe_code)]

use super::{Form, in_order, line, run};
use crate::driver::{Device, DeviceKind, patience};
use crate::error::{Error, Result};
use std::fmt;
use std::time::{Duration, Instant};

/// How long a GPU is waited for. Its healthy kernels need some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a self-test found: every kernel right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tested {
    /// How many kernels.
    pub kernels: usize,
    /// How long it took, with what the host did.
    pub elapsed: Duration,
}

impl fmt::Display for Tested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kernels give the right bits, tested in {:.3} s", self.kernels, self.elapsed.as_secs_f64())
    }
}

impl Device {
    /// Runs the smallest case of every kernel of the library and compares its bits with the committed ones. It takes 2 MiB of the device
    /// for the time of the test, and waits for a GPU two seconds at most in all, whatever its deadline; for the emulator, whose kernels run
    /// on the host, as long as its deadline says for each. What was queued before is waited for first; while the test runs, nothing else
    /// should use the device, since that is waited for, too.
    ///
    /// A GPU is tested by itself when it is opened and its kernels are new: see [`SelfTest`](crate::SelfTest).
    ///
    /// # Errors
    /// [`Error::Kernels`] with the first kernel that gives wrong bits, does not end, or is refused; where it does not end, the device is
    /// lost. Other errors when the test cannot be made: [`Error::DeviceMemory`], say.
    pub fn self_test(&self) -> Result<Tested> {
        if self.rehearses() {
            let got = "the rehearsal of one, on which no kernel runs";
            return Err(Error::misuse("self_test", "a device", got));
        }
        self.synchronize(self.deadline())?;
        match self.description().kind {
            DeviceKind::Cuda => patience::limited(PATIENCE, || self.compare(Form::Smallest.golden())),
            _ => self.compare(Form::Smallest.golden()),
        }
    }

    /// Compares every kernel's bits with those of a text of digests.
    fn compare(&self, golden: &str) -> Result<Tested> {
        let _span = tracing::debug_span!("self_test").entered();
        let start = Instant::now();
        let mut kernels = 0;
        for (kernel, case) in in_order() {
            let results = run(self, &case, Form::Smallest).map_err(|error| self.blame(kernel, error))?;
            let found = line(kernel, &results);
            if !golden.lines().any(|line| line == found.trim_end()) {
                return Err(
                    self.wrong(kernel, format!("gives wrong bits: the digest of its results is {}", &found[..16]))
                );
            }
            kernels += 1;
        }
        Ok(Tested { kernels, elapsed: start.elapsed() })
    }

    /// What an error in a kernel's case says about the kernel.
    fn blame(&self, kernel: &'static str, error: Error) -> Error {
        match error {
            // What else takes too long is no kernel: memory, say.
            Error::Timeout { call: "launch" | "synchronize", waited, .. } => {
                let busy = if self.description().kind == DeviceKind::Cuda && waited < PATIENCE / 2 {
                    "; those before it took the rest of 2 s: do other programs keep the GPU busy?"
                } else {
                    ""
                };
                self.wrong(kernel, format!("had not ended after {:.1} s{busy}", waited.as_secs_f64()))
            }
            Error::Driver { call, reason, .. } => self.wrong(kernel, format!("fails: `{call}`: {reason}")),
            Error::Kernel(fault) => self.wrong(kernel, format!("fails: {fault}")),
            other => other,
        }
    }

    fn wrong(&self, kernel: &'static str, reason: String) -> Error {
        let description = self.description();
        Error::Kernels { kernel, reason, device: description.name.clone(), ptx: description.ptx.clone() }
    }
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
        let golden = Form::Smallest.golden();
        for kernel in ["fill_f32", "cross_entropy_f32", "mean_tokens_backward_bf16"] {
            let at = golden.find(&format!("  {kernel}\n")).unwrap() - 1;
            let mut planted = golden.to_owned();
            planted.replace_range(at..=at, if &golden[at..=at] == "0" { "1" } else { "0" });
            let error = device.compare(&planted).unwrap_err();
            let (named, reason) = kernel_of(&error);
            assert_eq!(named, kernel);
            assert!(reason.contains("wrong bits"), "{error}");
        }
        // A kernel without a digest is not right either.
        let line = golden.lines().find(|line| line.ends_with("  fill_f32")).unwrap();
        let error = device.compare(&golden.replace(line, "")).unwrap_err();
        assert_eq!(kernel_of(&error).0, "fill_f32");
        assert_eq!(device.lost(), None);
        assert_eq!(device.self_test().unwrap().kernels, cases().len());
    }
}
