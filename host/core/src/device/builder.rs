//! Opening a device: its deadline, staging ring, checks, kernels and layers over its driver.
//!
//! Invariant: a device that cannot meet its settings is not opened, and the error contains advice.

#![forbid(unsafe_code)]

use super::driver::{DeviceKind, Driver, DriverLayer};
use super::driver_thread::DriverThread;
use super::emulated;
use super::kernels::{Kernels, check_names};
use super::matrix_instruction::MatrixInstruction;
use super::staging::{RingSize, Staging};
use super::{Device, no_result};
use crate::error::{Error, Resource, Result};
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
    layers: Vec<Box<dyn DriverLayer>>,
    /// The requested number of slots, and the bytes of each.
    staging: Option<(usize, usize)>,
    checked: bool,
    kernels: Vec<Kernels>,
    matrix_instruction: Option<MatrixInstruction>,
    self_test: SelfTest,
}

/// Checked mode as the program requested it and as the environment overrides it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedMode {
    pub(super) asked: bool,
    pub(super) forced: Option<bool>,
}

impl Device {
    /// Opens a device with the default settings.
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
        Self {
            kind,
            ordinal: 0,
            deadline: DEFAULT_DEADLINE,
            layers: Vec::new(),
            staging: None,
            checked: false,
            kernels: Vec::new(),
            matrix_instruction: None,
            self_test: SelfTest::default(),
        }
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

    /// Sets the instruction by which matrix multiplies and attention run. The default is the
    /// fastest that the GPU and the build have, and [`MatrixInstruction::MmaSync`] on the emulator,
    /// unless the environment variable `STEPSCOPE_MATRIX_INSTRUCTION` (`mma-sync` or `wgmma`)
    /// selects one. A GPU without the selected instruction is not opened.
    #[must_use]
    pub fn matrix_instruction(mut self, instruction: MatrixInstruction) -> Self {
        self.matrix_instruction = Some(instruction);
        self
    }

    /// Sets when the library's kernels are tested (default: [`SelfTest::WhenNew`]). The environment
    /// variable `STEPSCOPE_SELF_TEST` (`new`, `always` or `never`) overrides this.
    #[must_use]
    pub fn self_test(mut self, when: SelfTest) -> Self {
        self.self_test = when;
        self
    }

    /// Returns when the kernels are tested, from the setting, the environment and the layers.
    pub(super) fn tests(&self) -> Result<SelfTest> {
        let variable = std::env::var_os(SELF_TEST_VARIABLE).map(|value| value.to_string_lossy().into_owned());
        let asked = self.self_test.unless(variable.as_deref())?;
        let skipped = self.has_layers() && asked == SelfTest::WhenNew;
        Ok(if skipped { SelfTest::Never } else { asked })
    }

    /// Returns true if a layer covers the driver.
    pub(super) fn has_layers(&self) -> bool {
        !self.layers.is_empty()
    }

    /// Puts a layer over the device's driver and earlier layers, such as a `FaultPlan`, which makes
    /// chosen calls fail. Opening such a device skips the kernel test unless [`SelfTest::Always`]
    /// is set, because a plan counts the program's own calls.
    #[must_use]
    pub fn layer(mut self, layer: impl DriverLayer + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Opens the device without testing its kernels.
    pub(crate) fn open_untested(self) -> Result<Device> {
        check_names(&self.kernels)?;
        let ring = self.staging.map(|(slots, slot_bytes)| RingSize::asked(slots, slot_bytes)).transpose()?;
        let checks = CheckedMode { asked: self.checked, forced: checked_variable()? };
        let asked = MatrixInstruction::asked(self.matrix_instruction)?;
        let thread = DriverThread::start().map_err(|error| Error::system("device", Resource::Thread, error))?;
        let (kind, ordinal, kernels) = (self.kind, self.ordinal, self.kernels);
        // Opening compiles the kernels, which takes seconds, and the driver can hang here as in any
        // call.
        let opened = thread.run(self.deadline.max(DEFAULT_DEADLINE), move || {
            // The driver thread inherits the floating-point mode of the thread that opens the
            // device.
            float_mode::set_default();
            match kind {
                DeviceKind::Emulated => emulated(asked),
                DeviceKind::Cuda => cuda(ordinal, &kernels, asked),
                DeviceKind::Auto => cuda(ordinal, &kernels, asked).or_else(|reason| match reason {
                    // A GPU is there, without the requested instruction.
                    Error::Misuse { .. } => Err(reason),
                    _ => {
                        tracing::debug!(%reason, "no CUDA device, using the emulator");
                        emulated(asked)
                    }
                }),
            }
        });
        let driver = opened.map_err(|reason| no_result("open", reason))??;
        let driver = self.layers.iter().fold(driver, |driver, layer| layer.cover(driver));
        let ring = ring.unwrap_or_else(|| RingSize::of(driver.description().kind));
        Ok(Device::new(driver, thread, self.deadline, Staging::new(ring), checks))
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

fn emulated(asked: Option<MatrixInstruction>) -> Result<Arc<dyn Driver>> {
    let expected = "0 or 1 in STEPSCOPE_RACES and a seed in STEPSCOPE_SHUFFLE";
    Mode::from_environment().map_err(|found| Error::misuse("emulator", expected, found))?;
    Ok(Arc::new(emulated::Emulated::new(asked == Some(MatrixInstruction::Wgmma))))
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32, others: &[Kernels], asked: Option<MatrixInstruction>) -> Result<Arc<dyn Driver>> {
    Ok(Arc::new(super::cuda::Cuda::open(ordinal, others, asked)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: u32, _: &[Kernels], _: Option<MatrixInstruction>) -> Result<Arc<dyn Driver>> {
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
}
