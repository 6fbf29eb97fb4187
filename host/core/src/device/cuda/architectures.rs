//! The choice of PTX for a GPU: one text with the kernels of every GPU, and next to it, on compute
//! capability 9.0, the kernels of warpgroups.
//!
//! Invariant: a GPU receives only PTX that its driver can compile for it.

#![forbid(unsafe_code)]

use crate::device::MatrixInstruction;
use crate::error::{Error, Result};

/// The architecture of PTX that holds only the kernels of warpgroups.
const WGMMA_ARCH: &str = "sm_90a";

/// PTX and its architecture.
type Built = (&'static str, &'static str);

/// Returns the PTX with the highest architecture that this GPU runs, for all kernels except those
/// of warpgroups.
pub(super) fn choose(ptx: &'static [Built], capability: u32) -> Option<Built> {
    let fitting = |built: &&Built| (built.0 != WGMMA_ARCH).then(|| fitting(built.0, capability)).flatten();
    ptx.iter().filter(|built| fitting(built).is_some()).max_by_key(fitting).copied()
}

/// Returns the number of an architecture, and true if it has a suffix. None if this GPU does not
/// run it: code for `sm_90a` runs on 9.0 only, code for `sm_120f` on 12.0 and later of 12.
fn fitting(arch: &str, capability: u32) -> Option<(u32, bool)> {
    let name = arch.strip_prefix("sm_")?;
    let digits = name.trim_end_matches(['a', 'f']);
    let number: u32 = digits.parse().ok()?;
    let fits = match &name[digits.len()..] {
        "" => number <= capability,
        "a" => number == capability,
        _ => number <= capability && number / 10 == capability / 10,
    };
    fits.then_some((number, digits.len() < name.len()))
}

/// Returns the PTX of the kernels of warpgroups.
pub(super) fn wgmma(ptx: &'static [Built]) -> Option<Built> {
    ptx.iter().find(|(arch, _)| *arch == WGMMA_ARCH).copied()
}

/// Returns the PTX of the library's kernels of warpgroups if the GPU called `name` is to run them:
/// if they were asked for, or if it can and nothing else was asked for.
pub(super) fn choose_wgmma(
    ptx: &'static [Built],
    capability: u32,
    name: &str,
    asked: Option<MatrixInstruction>,
) -> Result<Option<Built>> {
    const CALL: &str = "matrix_instruction";
    let built = wgmma(ptx);
    match asked {
        Some(MatrixInstruction::MmaSync) => Ok(None),
        Some(MatrixInstruction::Wgmma) if capability != 90 => {
            let expected = "mma-sync, or for wgmma a GPU of compute capability 9.0, such as an H100";
            Err(Error::misuse(CALL, expected, format!("wgmma for {name}, sm_{capability}")))
        }
        Some(MatrixInstruction::Wgmma) if built.is_none() => {
            let expected = format!(
                "mma-sync, or for wgmma a build with kernels for {WGMMA_ARCH} (STEPSCOPE_ARCHS=sm_90,{WGMMA_ARCH})"
            );
            Err(Error::misuse(CALL, expected, format!("wgmma in a build for {}", archs(ptx))))
        }
        _ => Ok(built.filter(|_| capability == 90)),
    }
}

/// Lists the architectures of PTX.
pub(super) fn archs(ptx: &[Built]) -> String {
    ptx.iter().map(|(arch, _)| *arch).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILT: &[Built] =
        &[("sm_121", "121"), ("sm_90", "90"), ("sm_90a", "90a"), ("sm_100f", "100f"), ("sm_120a", "120a")];

    #[test]
    fn highest_fitting_ptx_is_chosen() {
        let chosen = |ptx, capability| choose(ptx, capability).map(|(arch, _)| arch);
        for (capability, arch) in [
            (80, None),
            (90, Some("sm_90")),
            (100, Some("sm_100f")),
            (103, Some("sm_100f")),
            (120, Some("sm_120a")),
            (121, Some("sm_121")),
        ] {
            assert_eq!(chosen(BUILT, capability), arch, "{capability}");
        }
        assert_eq!(chosen(&[("sm_90a", "")], 90), None);
        assert_eq!(chosen(&[("sm_121", ""), ("sm_121a", "")], 121), Some("sm_121a"));
    }

    #[test]
    fn warpgroups_need_gpu_and_build() {
        use MatrixInstruction::{MmaSync, Wgmma};
        let chosen = |ptx, capability, asked| choose_wgmma(ptx, capability, "Made Up", asked);
        for (capability, asked, want) in [
            (90, None, Some(("sm_90a", "90a"))),
            (90, Some(Wgmma), Some(("sm_90a", "90a"))),
            (90, Some(MmaSync), None),
            (121, None, None),
            (121, Some(MmaSync), None),
        ] {
            assert_eq!(chosen(BUILT, capability, asked), Ok(want), "{capability} {asked:?}");
        }
        assert_eq!(chosen(&BUILT[..2], 90, None), Ok(None));
        let error = chosen(BUILT, 121, Some(Wgmma)).unwrap_err().to_string();
        assert!(error.contains("wgmma for Made Up, sm_121") && error.contains("9.0"), "{error}");
        let error = chosen(&BUILT[..2], 90, Some(Wgmma)).unwrap_err().to_string();
        assert!(error.contains("STEPSCOPE_ARCHS=sm_90,sm_90a") && error.contains("build for sm_121, sm_90"), "{error}");
    }
}
