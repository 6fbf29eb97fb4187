//! The size of a text that general compressors leave, for comparison with a model's bits per byte.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use lzma_rust2::{XzOptions, XzWriter};
use serde::Serialize;

/// The level of xz, which is the default of the program.
const XZ_LEVEL: u32 = 6;

/// The bits per byte of a compressed text.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Compressed {
    pub(crate) gzip: f64,
    pub(crate) xz: f64,
}

impl Compressed {
    /// Compresses a text.
    pub(crate) fn of(text: &[u8]) -> Self {
        let bits_per_byte = |compressed: io::Result<Vec<u8>>| {
            8.0 * compressed.expect("memory can be written").len() as f64 / text.len().max(1) as f64
        };
        Self { gzip: bits_per_byte(gzip(text)), xz: bits_per_byte(xz(text)) }
    }
}

fn gzip(text: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text)?;
    encoder.finish()
}

fn xz(text: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = XzWriter::new(Vec::new(), XzOptions::with_preset(XZ_LEVEL))?;
    encoder.write_all(text)?;
    encoder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes are within 3 % of those of the programs gzip 1.12 with `-9` and xz 5.4.1.
    #[test]
    fn sizes_are_those_of_programs() {
        let text: String = (0..20_000u32).map(|number| format!("{}\n", number * number % 977)).collect();
        assert_eq!(text.len(), 77_583);
        for (compressed, programs) in [(gzip(text.as_bytes()), 2420.0), (xz(text.as_bytes()), 1828.0)] {
            let size = compressed.unwrap().len() as f64;
            assert!((size / programs - 1.0).abs() < 0.03, "{size} bytes, not {programs}");
        }
    }
}
