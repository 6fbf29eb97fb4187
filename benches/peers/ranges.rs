//! The ranges of prices for the lstm examples of the Rust peers: those of ../../examples/lstm.rs.

use std::error::Error;
use std::path::Path;

/// Minutes of a value.
const MINUTES: usize = 15;

#[derive(serde::Deserialize)]
struct Bar {
    high: f64,
    low: f64,
}

/// Reads the logarithms of the ranges. The first four fifths have mean 0 and deviation 1.
pub(crate) fn read(path: &Path) -> Result<Vec<f32>, Box<dyn Error>> {
    let bars = csv::Reader::from_path(path)?.deserialize().collect::<Result<Vec<Bar>, _>>()?;
    let range = |bars: &[Bar]| {
        let high = bars.iter().map(|bar| bar.high).fold(0.0, f64::max);
        let low = bars.iter().map(|bar| bar.low).fold(f64::MAX, f64::min);
        (high / low - 1.0).max(1e-5).ln()
    };
    let values: Vec<f64> = bars.chunks_exact(MINUTES).map(range).collect();
    let known = &values[..values.len() / 5 * 4];
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let deviation = (known.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / known.len() as f64).sqrt();
    Ok(values.iter().map(|value| ((value - mean) / deviation) as f32).collect())
}

/// Draws values from -2 to 2 as bars.
pub(crate) fn plot(values: &[f32]) -> String {
    let bar = |value: &f32| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][((value + 2.0) * 2.0).clamp(0.0, 7.0) as usize];
    values.iter().map(bar).collect()
}
