//! How a device is opened: its deadline, its ring of staging slots, its checks, the kernels that it has, and planted faults.
//!
//! Invariant: a device that cannot be driven as asked is not opened, and the error says what to do.

#![forbid(unsafe_code)]

use super::calls::Driver;
use super::description::DeviceKind;
use super::device::{CheckedMode, Device};
use super::emulated;
use super::faults::{FaultPlan, Faulty};
use super::kernels::{Kernels, check_names};
use super::lane::{Lane, TimedOut};
use super::ring::{RingSize, Staging};
use crate::error::{Error, Result};
use cuda_std::emulator::Mode;
use cuda_std::float_mode;
use std::sync::Arc;
use std::time::Duration;

/// How long a call of the driver, or a wait for the device, may take unless the caller says otherwise. A step of training
/// lasts milliseconds.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The environment variable that turns checked mode on (`1`) or off (`0`).
const CHECKED_VARIABLE: &str = "STEPSCOPE_CHECKED";
/// The environment variable that says whether kernels are tested when a device is opened (`new`, `always` or `never`).
const SELF_TEST_VARIABLE: &str = "STEPSCOPE_SELF_TEST";

/// Whether the kernels of a device are tested when it is opened; see [`Device::self_test`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SelfTest {
    /// Those of a GPU, when their PTX, compiled by this driver, was not yet seen to be right on this kind of GPU.
    #[default]
    WhenNew,
    /// On any device, every time.
    Always,
    /// Not at all: what the kernels compute may be wrong, or never end.
    Never,
}

impl SelfTest {
    /// What the environment says where it says anything.
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

/// Settings of a device; see [`Device::builder`].
#[derive(Debug)]
pub struct DeviceBuilder {
    kind: DeviceKind,
    ordinal: u32,
    deadline: Duration,
    faults: Option<FaultPlan>,
    /// Slots and the bytes of each, as they were asked for.
    staging: Option<(usize, usize)>,
    checked: bool,
    kernels: Vec<Kernels>,
    self_test: SelfTest,
}

impl Device {
    /// Opens a device with the default settings.
    ///
    /// # Errors
    /// As for [`DeviceBuilder::open`].
    pub fn open(kind: DeviceKind) -> Result<Self> {
        Self::builder(kind).open()
    }

    /// Settings for a device.
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

    /// Which of the GPUs that the program can see, counted from 0 (default: 0). The emulator takes any number.
    #[must_use]
    pub fn ordinal(mut self, ordinal: usize) -> Self {
        self.ordinal = u32::try_from(ordinal).unwrap_or(u32::MAX);
        self
    }

    /// How long a call of the driver may take (default [`DEFAULT_DEADLINE`]).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Page-locked host memory that uploads pass through: `slots` of `slot_bytes` each, at least one of at least 4 KiB (default:
    /// two of 64 MiB, on the emulator of 1 MiB). Each is taken from the system when it is first
    /// needed. If all of them are more than the host has available when the device is opened,
    /// opening it is [`Error::DeviceMemory`].
    #[must_use]
    pub fn staging(mut self, slots: usize, slot_bytes: usize) -> Self {
        self.staging = Some((slots, slot_bytes));
        self
    }

    /// Whether what is uploaded to buffers is verified on the device, and whether arenas of this device are checked unless they
    /// say otherwise (default: no). The environment variable `STEPSCOPE_CHECKED` (`1` or `0`) overrides this and them.
    #[must_use]
    pub fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// Kernels of another package than stepscope's, made by [`kernels!`](crate::kernels) there; to be called once for each package.
    #[must_use]
    pub fn kernels(mut self, kernels: Kernels) -> Self {
        self.kernels.push(kernels);
        self
    }

    /// When the library's kernels are tested (default: [`SelfTest::WhenNew`]). The environment variable `STEPSCOPE_SELF_TEST`
    /// (`new`, `always` or `never`) overrides this.
    #[must_use]
    pub fn self_test(mut self, when: SelfTest) -> Self {
        self.self_test = when;
        self
    }

    /// When the kernels are tested, by all that has a say.
    pub(crate) fn tests(&self) -> Result<SelfTest> {
        let variable = std::env::var_os(SELF_TEST_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        let asked = self.self_test.unless(variable.as_deref())?;
        let planted = self.has_faults() && asked == SelfTest::WhenNew;
        Ok(if planted { SelfTest::Never } else { asked })
    }

    /// Whether faults are planted.
    pub(crate) fn has_faults(&self) -> bool {
        self.faults.is_some()
    }

    /// Makes chosen calls of the driver fail, for tests. Such a device is not tested when it is opened, unless with
    /// [`SelfTest::Always`]: the plan counts what the program does.
    #[must_use]
    pub fn faults(mut self, plan: FaultPlan) -> Self {
        self.faults = Some(plan);
        self
    }

    /// Opens the device; its kernels are not tested.
    pub(crate) fn open_untested(self) -> Result<Device> {
        check_names(&self.kernels)?;
        let ring = self.staging.map(|(slots, slot_bytes)| RingSize::asked(slots, slot_bytes)).transpose()?;
        let checks = CheckedMode { asked: self.checked, forced: checked_variable()? };
        let lane = Lane::start().map_err(|error| Error::NoDevice {
            wanted: "any",
            reason: format!("no thread for the driver's calls: {error}"),
        })?;
        let (kind, ordinal, kernels) = (self.kind, self.ordinal, self.kernels);
        // Opening compiles the kernels, which takes seconds, and a driver can hang there as anywhere.
        let opened = lane.run(self.deadline.max(DEFAULT_DEADLINE), move || {
            // The lane inherits the mode of the thread that opens the device.
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

/// Whether the environment asks for checked mode.
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
    fn the_environment_decides_whether_kernels_are_tested() {
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
    fn planted_faults_are_not_met_by_a_test_that_nobody_asked_for() {
        let planted = |when| Device::builder(DeviceKind::Emulated).self_test(when).faults(FaultPlan::new()).tests();
        assert_eq!(planted(SelfTest::WhenNew), Ok(SelfTest::Never));
        assert_eq!(planted(SelfTest::Always), Ok(SelfTest::Always));
        assert_eq!(Device::builder(DeviceKind::Emulated).tests(), Ok(SelfTest::WhenNew));
    }
}
