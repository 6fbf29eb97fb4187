//! Benchmarks the upload of weights: very many small tensors, and one very large tensor.
//!
//! Run `cargo bench --bench upload` (the emulator) or `cargo bench --features cuda --bench upload
//! -- --device cuda`. The same run compares with direct calls: a pageable `cuMemcpyHtoDAsync` for
//! each small tensor, and one `cuMemcpyHtoDAsync` of the whole large tensor from pinned memory,
//! which is the link's limit. Prints a table, and writes every sample to
//! `benches/runs/DATE-GPU-upload.json`.
//!
//! Invariant: a sample ends when the device has all bytes, and the last ones are verified.

#![deny(unsafe_op_in_unsafe_fn)]

#[allow(dead_code, unused_imports, reason = "the peer is the driver itself, not a program")]
mod harness;

use clap::Parser;
use harness::{Common, Samples, record};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use stepscope::parameters::Initializer;
use stepscope::upload::Transfer;
use stepscope::{Device, DeviceKind, ParameterSpec, Parameters};

/// Bytes per small tensor.
const SMALL_BYTES: usize = 1024;
/// The number of elements that are compared at the end.
const COMPARED: usize = 256;

/// Times uploads of weights
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Small tensors, 1 KiB each
    #[arg(long, value_name = "N", default_value = "213304")]
    small: usize,
    /// Size of the large tensor in MiB [default: 5120 on a GPU, 64 on the emulator]
    #[arg(long, value_name = "MIB")]
    large: Option<usize>,
    /// Samples per case
    #[arg(long, value_name = "N", default_value = "9")]
    repeats: usize,
    /// Staging rings to try: slots and MiB per slot
    #[arg(long, value_name = "SLOTSxMIB,..", value_delimiter = ',', default_value = "2x64")]
    ring: Vec<Ring>,
}

/// A ring of pinned slots.
#[derive(Clone, Copy, Debug)]
struct Ring {
    slots: usize,
    mebibytes: usize,
}

impl FromStr for Ring {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('x').and_then(|(slots, size)| Some((slots.parse().ok()?, size.parse().ok()?)));
        let (slots, mebibytes) = parts.ok_or_else(|| format!("`{text}` is not of the form 2x64"))?;
        Ok(Self { slots, mebibytes })
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} MiB", self.slots, self.mebibytes)
    }
}

/// An upload.
#[derive(Clone, Copy, Debug, Serialize)]
struct Case {
    tensors: usize,
    tensor_bytes: usize,
}

impl Case {
    fn bytes(self) -> usize {
        self.tensors * self.tensor_bytes
    }

    /// Returns pageable memory that is resident, with a separate allocation per tensor.
    fn sources(self) -> Vec<Vec<u8>> {
        let source = |tensor: usize| {
            // All values are finite as f32, since no byte has all exponent bits set.
            let pattern: Vec<u8> = (0..251).map(|at| ((at + tensor) % 120) as u8).collect();
            let mut bytes = pattern.repeat(self.tensor_bytes.div_ceil(pattern.len()));
            bytes.truncate(self.tensor_bytes);
            bytes
        };
        (0..self.tensors).map(source).collect()
    }
}

/// A line of the table. The peer has no ring.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    case: Case,
    contender: String,
    nanoseconds: Samples,
}

fn main() -> harness::Result<()> {
    let Args { common, small, large, repeats, ring } = Args::parse();
    let device = common.builder().open()?;
    let kind = device.description().kind;
    let large = large.unwrap_or(if kind == DeviceKind::Cuda { 5120 } else { 64 });
    let cases = [Case { tensors: small, tensor_bytes: SMALL_BYTES }, Case { tensors: 1, tensor_bytes: large << 20 }];
    let mut lines = Vec::new();
    println!("{}", device.description().name);
    for case in cases {
        let sources = case.sources();
        let peer = peer(kind, case, &sources, repeats)?;
        if peer.is_none() {
            println!("the peer is CUDA's own copy: not measured on this device");
        }
        for &ring in &ring {
            let nanoseconds = ours(kind, ring, case, &sources, repeats)?;
            print_line(case, ring, &nanoseconds, peer.as_ref());
            lines.push(Line { case, contender: format!("stepscope, {ring}"), nanoseconds });
        }
        lines.extend(peer.map(|nanoseconds| Line { case, contender: "cuMemcpyHtoDAsync".into(), nanoseconds }));
    }
    println!("samples in {}", record("upload", &device, &lines)?);
    Ok(())
}

/// Prints our times next to the peer's.
fn print_line(case: Case, ring: Ring, ours: &Samples, peer: Option<&Samples>) {
    let figures = |samples: &Samples| {
        let [low, median, high] = [0.1, 0.5, 0.9].map(|share| samples.quantile(share));
        let rate = case.bytes() as f64 / median;
        format!("{:9.3} ms ({:.3} to {:.3}), {rate:6.2} GB/s", median / 1e6, low / 1e6, high / 1e6)
    };
    let Case { tensors, tensor_bytes } = case;
    println!("{tensors} x {tensor_bytes} bytes, ring {ring}: {}", figures(ours));
    if let Some(peer) = peer {
        let times = peer.quantile(0.5) / ours.quantile(0.5);
        println!("    cuMemcpyHtoDAsync: {}; ours is {times:.3} times as fast", figures(peer));
    }
}

/// Returns the nanoseconds from the sources to the device's memory, through the library.
fn ours(kind: DeviceKind, ring: Ring, case: Case, sources: &[Vec<u8>], repeats: usize) -> harness::Result<Samples> {
    let device = Device::builder(kind).staging(ring.slots, ring.mebibytes << 20).open()?;
    let mut spec = ParameterSpec::builder();
    for tensor in 0..case.tensors {
        spec.add(tensor.to_string(), [case.tensor_bytes / size_of::<f32>()], Initializer::Constant(0.0));
    }
    let mut parameters = Parameters::new(&device, &spec.build()?, 0)?;
    let load = || {
        let mut next = sources.iter();
        parameters.load(|_| next.next().map(Vec::as_slice), Transfer::new())
    };
    let samples = Samples::collect(repeats, 1, load, || device.synchronize(device.deadline()))?;
    let (region, last) = (parameters.regions()[0], sources.last().map(Vec::as_slice).unwrap_or_default());
    let mut held = Vec::new();
    region.for_each_piece(region.bytes() - COMPARED * size_of::<f32>()..region.bytes(), &mut |piece| {
        held.extend_from_slice(piece);
        Ok(())
    })?;
    if !last.ends_with(&held) {
        return Err("the device does not hold what was uploaded".into());
    }
    Ok(samples)
}

#[cfg(not(feature = "cuda"))]
fn peer(_: DeviceKind, _: Case, _: &[Vec<u8>], _: usize) -> harness::Result<Option<Samples>> {
    Ok(None)
}

/// Runs the driver's own copies, if there is a driver.
#[cfg(feature = "cuda")]
fn peer(kind: DeviceKind, case: Case, sources: &[Vec<u8>], repeats: usize) -> harness::Result<Option<Samples>> {
    if kind != DeviceKind::Cuda {
        return Ok(None);
    }
    Ok(Some(match sources {
        [source] => driver::pinned(source, repeats)?,
        _ => driver::pageable(case.tensor_bytes, sources, repeats)?,
    }))
}

/// Direct calls of CUDA.
#[cfg(feature = "cuda")]
mod driver {
    use crate::harness::Samples;
    use cust::memory::{DeviceBuffer, LockedBuffer};
    use cust::stream::{Stream, StreamFlags};
    use cust::sys::{self, CUresult};

    fn check(result: CUresult) -> Result<(), String> {
        if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{result:?}")) }
    }

    /// Times copies of `parts` to consecutive device memory.
    fn copies(bytes: usize, parts: &[&[u8]], repeats: usize) -> Result<Samples, Box<dyn std::error::Error>> {
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
        // SAFETY: all bytes are written before any is read.
        let memory = unsafe { DeviceBuffer::<u8>::uninitialized(bytes) }?;
        let copy = || {
            let mut to = memory.as_device_ptr().as_raw();
            parts.iter().try_for_each(|part| {
                // SAFETY: the parts fit the memory, and outlive the wait for the stream.
                let copied =
                    unsafe { sys::cuMemcpyHtoDAsync_v2(to, part.as_ptr().cast(), part.len(), stream.as_inner()) };
                to += part.len() as u64;
                check(copied)
            })
        };
        let settle = || stream.synchronize().map_err(|error| error.to_string());
        Ok(Samples::collect(repeats, 1, copy, settle)?)
    }

    /// Times one copy per tensor, from its own place.
    pub(super) fn pageable(
        tensor_bytes: usize,
        sources: &[Vec<u8>],
        repeats: usize,
    ) -> Result<Samples, Box<dyn std::error::Error>> {
        let _context = cust::quick_init()?;
        let parts: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
        copies(tensor_bytes * sources.len(), &parts, repeats)
    }

    /// Times one copy of everything from pinned memory.
    pub(super) fn pinned(source: &[u8], repeats: usize) -> Result<Samples, Box<dyn std::error::Error>> {
        let _context = cust::quick_init()?;
        let pinned = LockedBuffer::from_slice(source)?;
        copies(source.len(), &[&pinned], repeats)
    }
}
