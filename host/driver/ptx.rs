//! The kernels' PTX as it was built in, one text for each architecture; without feature `cuda` there is none.
//!
//! Invariant: the same sources and device compiler give the same bytes on any host, so that a digest names the kernels.

use crate::params::hex;
use sha2::{Digest, Sha256};

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
#[cfg(not(feature = "cuda"))]
static PTX: &[(u32, &str)] = &[];

/// The SHA-256, in hexadecimal, of the PTX for each architecture: (121, digest) is that of `sm_121.ptx`, as `ci/ptx` prints
/// it. Empty without feature `cuda`.
pub fn ptx_digests() -> Vec<(u32, String)> {
    PTX.iter().map(|(arch, ptx)| (*arch, hex(&Sha256::digest(ptx)))).collect()
}
