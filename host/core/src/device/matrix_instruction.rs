//! The instruction by which matrix multiplies and attention run: that of a warp, or that of four.
//!
//! Invariant: the instruction is chosen once, when a device is opened, and never changes. It
//! decides no bit.

#![forbid(unsafe_code)]

use super::driver::Description;
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The environment variable that selects the instruction (`mma-sync` or `wgmma`) where the program
/// does not.
const VARIABLE: &str = "STEPSCOPE_MATRIX_INSTRUCTION";

/// The instruction by which a device multiplies matrices of BF16 and TF32, and computes attention
/// on them. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixInstruction {
    /// `mma.sync`, which one warp executes. Every GPU that stepscope supports has it.
    MmaSync,
    /// `wgmma`, which four warps execute together. GPUs of compute capability 9.0 (H100, H200) have
    /// it. It needs kernels for `sm_90a`, which the default build contains.
    Wgmma,
}

impl MatrixInstruction {
    /// Every instruction, the most widely available first.
    pub const ALL: [Self; 2] = [Self::MmaSync, Self::Wgmma];

    /// Returns the program's choice, or else the environment's. None if there is neither.
    pub(super) fn asked(chosen: Option<Self>) -> Result<Option<Self>> {
        let variable = std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
        Self::unless(chosen, variable.as_deref())
    }

    fn unless(chosen: Option<Self>, variable: Option<&str>) -> Result<Option<Self>> {
        match (chosen, variable) {
            (None, Some(text)) => text
                .parse()
                .map(Some)
                .map_err(|_| Error::misuse("device", format!("mma-sync or wgmma in {VARIABLE}"), format!("`{text}`"))),
            _ => Ok(chosen),
        }
    }
}

impl fmt::Display for MatrixInstruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MmaSync => "mma-sync",
            Self::Wgmma => "wgmma",
        })
    }
}

impl FromStr for MatrixInstruction {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|instruction| instruction.to_string() == text);
        found.ok_or_else(|| Error::misuse("matrix_instruction", "mma-sync or wgmma", format!("`{text}`")))
    }
}

impl Description {
    /// Returns the instruction by which the device multiplies matrices.
    pub fn matrix_instruction(&self) -> MatrixInstruction {
        if self.has_wgmma { MatrixInstruction::Wgmma } else { MatrixInstruction::MmaSync }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, DeviceKind};

    #[test]
    fn program_overrides_environment() {
        for instruction in MatrixInstruction::ALL {
            let text = instruction.to_string();
            assert_eq!(text.parse(), Ok(instruction));
            assert_eq!(MatrixInstruction::unless(None, Some(&text)), Ok(Some(instruction)));
            for variable in [None, Some("mma-sync"), Some("wgmma"), Some("tcgen05")] {
                assert_eq!(MatrixInstruction::unless(Some(instruction), variable), Ok(Some(instruction)));
            }
        }
        assert_eq!(MatrixInstruction::unless(None, None), Ok(None));
        for malformed in ["", "mma", "Wgmma", "wgmma "] {
            let error = MatrixInstruction::unless(None, Some(malformed)).unwrap_err().to_string();
            assert!(error.contains("mma-sync or wgmma in STEPSCOPE_MATRIX_INSTRUCTION, got `"), "{error}");
        }
    }

    #[test]
    fn emulator_has_both() {
        for instruction in MatrixInstruction::ALL {
            let builder = Device::builder(DeviceKind::Emulated).matrix_instruction(instruction);
            let device = builder.open_untested().unwrap();
            assert_eq!(device.description().matrix_instruction(), instruction);
        }
    }
}
