//! The errors of a build. Every message contains the request, the actual state, and the remedy.

use std::{io, path::PathBuf, process::ExitStatus};

use crate::NvvmArch;

/// The reason why no PTX was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaBuilderError {
    /// `fma_contraction(true)`: rustc never contracts.
    #[error(
        "fma_contraction(true) was asked for, but rustc never fuses a multiplication with an addition: \
         write `.mul_add()` in the kernel where a fused one is wanted, and pass false"
    )]
    FmaContraction,

    /// A name that is not an architecture.
    #[error("`{asked}` is not a GPU architecture; known are {}", known())]
    UnknownArch {
        /// The given text.
        asked: String,
    },

    /// The folder holds no crate.
    #[error("no kernel crate at {}: there is no Cargo.toml in it, or cargo cannot read it", .path.display())]
    NoCrate {
        /// The given folder.
        path: PathBuf,
    },

    /// No compiler on this machine can build for the GPU.
    #[error(
        "no rustc was found that can compile kernels for {arch}. It needs LLVM's NVPTX backend and the source of \
         `core`. Tried, in this order:\n{}\nInstall one of these:\n  \
         apt-get install rustc-web rust-web-src                 # Debian\n  \
         rustup component add rust-src --toolchain nightly      # rustup\n\
         or name one: STEPSCOPE_DEVICE_RUSTC=/path/to/rustc; or take PTX made elsewhere: STEPSCOPE_PTX_DIR=/path",
        list(.tried)
    )]
    NoDeviceCompiler {
        /// The architecture to compile for.
        arch: NvvmArch,
        /// One line for each place that was searched: its name, and what it lacks.
        tried: Vec<String>,
    },

    /// A program could not be started.
    #[error("cannot run {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// The error of the system.
        source: io::Error,
    },

    /// An error reported by cargo or rustc, whose messages went to standard error.
    #[error("compiling {} for {arch} failed ({status}); the compiler's messages are above. Command: {command}", .path.display())]
    Build {
        /// The kernel crate.
        path: PathBuf,
        /// The architecture to compile for.
        arch: NvvmArch,
        /// The exit status of cargo.
        status: ExitStatus,
        /// The command, for running it again by hand.
        command: String,
    },

    /// The compiler's output is not a whole program for this GPU.
    #[error("the PTX at {} is not usable: {reason}", .path.display())]
    BadOutput {
        /// The file.
        path: PathBuf,
        /// The defect.
        reason: String,
    },

    /// The call of `write_table` outside a build script.
    #[error("OUT_DIR is not set: `write_table` is for a build script, which cargo runs")]
    NoBuildScript,

    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The verb: read, write, copy to.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

fn known() -> String {
    NvvmArch::ALL.iter().map(|arch| arch.sm()).collect::<Vec<_>>().join(", ")
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  - {line}")).collect::<Vec<_>>().join("\n")
}
