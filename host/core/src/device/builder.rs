//! Opening a device: its deadline, staging ring, checks, kernels and planted faults.
//!
//! Invariant: a device that cannot meet its settings is not opened, and the error contains advice.

#![forbid(unsafe_code)]

use super::driver::{DeviceKind, Driver};
use super::driver_thread::{DriverThread, TimedOut};
use super::emulated;
use super::faults::{FaultPlan, Faulty};
use super::handle::{CheckedMode, Device};
use super::kernels::{Kernels, check_names};
use super::staging::{RingSize, Staging};
use crate::error::{Error, Result};
use cuda_std::emulator::Mode;
use cuda_std::float_mode;
use std::sync::Arc;
use std::time::Duration;

/// The default deadline of a driver call or a wait for the device. A training step takes
/// milliseconds.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The environment variable that turns checked mode on (`1`) or off (`0`).
const CHECKED_VARIABLE: &str = "STEPSCOPE_CHECKED";
/// The environment variable that selects when kernels are tested (`new`, `always` or `never`).
const SELF_TEST_VARIABLE: &str = "STEPSCOPE_SELF_TEST";

/// The occasions on which opening a device tests its kernels. See [`Device::self_test`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SelfTest {
    /// Tests the kernels of a GPU unless this PTX, compiled by this driver, already passed on this
    /// kind of GPU.
    #[default]
    WhenNew,
    /// Tests the kernels of any device, every time.
    Always,
    /// Skips the test. Kernels may then compute wrong results or never end.
    Never,
}

impl SelfTest {
    /// Returns the environment's setting, or `self` if there is none.
    fn unless(self, variable: Option<&str>) -> Result<Self> {
        match variable {
            None => Ok(self),
            Some("new") => Ok(Self::WhenNew),
            Some("always") => Ok(Self::Always),
            Some("never") => Ok(Self::Never),
            Some(other) => {
                let expected = format!("new, always or never in {SELF_TEST_VARIABLE}");
                Err(Error::misuse("device", expected, format!("`{other}`")))
            }
        }
    }
}

/// The settings of a device. See [`Device::builder`].
#[derive(Debug)]
pub struct DeviceBuilder {
    kind: DeviceKind,
    ordinal: u32,
    deadline: Duration,
    faults: Option<FaultPlan>,
    /// The requested number of slots, and the bytes of each.
    staging: Option<(usize, usize)>,
    checked: bool,
    kernels: Vec<Kernels>,
    self_test: SelfTest,
}

impl Device {
    /// Opens a device with the default settings.
    ///
    /// # Errors
    /// The errors of [`DeviceBuilder::open`].
    pub fn open(kind: DeviceKind) -> Result<Self> {
        Self::builder(kind).open()
    }

    /// Returns default settings for a device.
    pub fn builder(kind: DeviceKind) -> DeviceBuilder {
        DeviceBuilder::new(kind)
    }
}

impl DeviceBuilder {
    fn new(kind: DeviceKind) -> Self {
        let (deadline, staging) = (DEFAULT_DEADLINE, None);
        let self_test = SelfTest::default();
        Self { kind, ordinal: 0, deadline, faults: None, staging, checked: false, kernels: Vec::new(), self_test }
    }

    /// Selects one of the GPUs that are visible to the program, counted from 0 (default: 0). The
    /// emulator accepts any number.
    #[must_use]
    pub fn ordinal(mut self, ordinal: usize) -> Self {
        self.ordinal = u32::try_from(ordinal).unwrap_or(u32::MAX);
        self
    }

    /// Sets the deadline of driver calls (default [`DEFAULT_DEADLINE`]).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the pinned host memory that uploads pass through: `slots` of `slot_bytes` each. The
    /// minimum is one slot of 4 KiB. The default is two slots of 64 MiB, or of 1 MiB on the
    /// emulator. Each slot is allocated when it is first needed. If all slots together exceed the
    /// host's available memory, opening the device returns [`Error::DeviceMemory`].
    #[must_use]
    pub fn staging(mut self, slots: usize, slot_bytes: usize) -> Self {
        self.staging = Some((slots, slot_bytes));
        self
    }

    /// Turns checked mode on or off (default: off). In checked mode, uploads to buffers are
    /// verified on the device, and arenas of this device are checked unless their own setting
    /// differs. The environment variable `STEPSCOPE_CHECKED` (`1` or `0`) overrides both settings.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// Adds the kernels of another package, made by [`kernels!`](crate::kernels) in that package.
    /// Call it once per package.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels.push(kernels);
        self
    }

    /// Sets when the library's kernels are tested (default: [`SelfTest::WhenNew`]). The environment
    /// variable `STEPSCOPE_SELF_TEST` (`new`, `always` or `never`) overrides this.
    #[must_use]
    pub fn self_test(mut self, when: SelfTest) -> Self {
        self.self_test = when;
        self
    }

    /// Returns when the kernels are tested, from the setting, the environment and the planted
    /// faults.
    pub(crate) fn tests(&self) -> Result<SelfTest> {
        let variable = std::env::var_os(SELF_TEST_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        let asked = self.self_test.unless(variable.as_deref())?;
        let planted = self.has_faults() && asked == SelfTest::WhenNew;
        Ok(if planted { SelfTest::Never } else { asked })
    }

    /// Returns true if faults are planted.
    pub(crate) fn has_faults(&self) -> bool {
        self.faults.is_some()
    }

    /// Makes chosen calls of the driver fail, for tests. Opening such a device skips the kernel
    /// test unless [`SelfTest::Always`] is set, because the plan counts the program's own calls.
    #[must_use]
    pub fn faults(mut self, plan: FaultPlan) -> Self {
        self.faults = Some(plan);
        self
    }

    /// Opens the device without testing its kernels.
    pub(crate) fn open_untested(self) -> Result<Device> {
        check_names(&self.kernels)?;
        let ring = self.staging.map(|(slots, slot_bytes)| RingSize::asked(slots, slot_bytes)).transpose()?;
        let checks = CheckedMode { asked: self.checked, forced: checked_variable()? };
        let lane = DriverThread::start().map_err(|error| Error::NoDevice {
            wanted: "any",
            reason: format!("no thread for the driver's calls: {error}"),
        })?;
        let (kind, ordinal, kernels) = (self.kind, self.ordinal, self.kernels);
        // Opening compiles the kernels, which takes seconds, and the driver can hang here as in any
        // call.
        let opened = lane.run(self.deadline.max(DEFAULT_DEADLINE), move || {
            // The driver thread inherits the floating-point mode of the thread that opens the
            // device.
            float_mode::set_default();
            match kind {
                DeviceKind::Emulated => emulated(),
                DeviceKind::Cuda => cuda(ordinal, &kernels),
                DeviceKind::Auto => cuda(ordinal, &kernels).or_else(|reason| {
                    tracing::debug!(%reason, "no CUDA device, using the emulator");
                    emulated()
                }),
            }
        });
        let mut driver =
            opened.map_err(|TimedOut { waited }| Error::Timeout { call: "open", waited, report: None })??;
        if let Some(plan) = self.faults {
            driver = Arc::new(Faulty::new(driver, plan));
        }
        let ring = ring.unwrap_or_else(|| RingSize::of(driver.description().kind));
        Ok(Device::new(driver, lane, self.deadline, Staging::new(ring), checks))
    }
}

/// Reads checked mode from the environment.
fn checked_variable() -> Result<Option<bool>> {
    match std::env::var_os(CHECKED_VARIABLE).map(|value| value.to_string_lossy().into_owned()).as_deref() {
        None => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => Err(Error::misuse("device", "0 or 1 in STEPSCOPE_CHECKED", format!("`{other}`"))),
    }
}

fn emulated() -> Result<Arc<dyn Driver>> {
    let expected = "0 or 1 in STEPSCOPE_RACES and a seed in STEPSCOPE_SHUFFLE";
    Mode::from_environment().map_err(|found| Error::misuse("emulator", expected, found))?;
    Ok(Arc::new(emulated::Emulated::new()))
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32, others: &[Kernels]) -> Result<Arc<dyn Driver>> {
    Ok(Arc::new(super::cuda::Cuda::open(ordinal, others)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: &[Kernels]) -> Result<Arc<dyn Driver>> {
    let reason = "this build has no CUDA; build with `--features cuda`".into();
    Err(Error::NoDevice { wanted: "cuda", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_overrides_self_test() {
        for chosen in [SelfTest::WhenNew, SelfTest::Always, SelfTest::Never] {
            assert_eq!(chosen.unless(None), Ok(chosen));
            for (text, asked) in [("new", SelfTest::WhenNew), ("always", SelfTest::Always), ("never", SelfTest::Never)]
            {
                assert_eq!(chosen.unless(Some(text)), Ok(asked));
            }
            for malformed in ["", "1", "Always", "never "] {
                let error = chosen.unless(Some(malformed)).unwrap_err().to_string();
                assert!(error.contains("new, always or never in STEPSCOPE_SELF_TEST, got `"), "{error}");
            }
        }
    }

    #[test]
    fn unrequested_self_test_skips_planted_faults() {
        let planted = |when| Device::builder(DeviceKind::Emulated).self_test(when).faults(FaultPlan::new()).tests();
        assert_eq!(planted(SelfTest::WhenNew), Ok(SelfTest::Never));
        assert_eq!(planted(SelfTest::Always), Ok(SelfTest::Always));
        assert_eq!(Device::builder(DeviceKind::Emulated).tests(), Ok(SelfTest::WhenNew));
    }
}
