//! Fuzzes the reader of price bars with arbitrary bytes.
//!
//! Invariant: the reader never panics. It returns bars that keep every rule in `bars.rs`, or an
//! error that names a line of the file. With `STEPSCOPE_PLANT` set, the bars are corrupted before
//! they are checked.

#![no_main]

#[path = "../../examples/crossasset/bars.rs"]
#[allow(dead_code, reason = "the example opens files, and reports too few bars")]
mod bars;

use bars::{Bar, BarsError, parse_bars};
use libfuzzer_sys::fuzz_target;
use std::io::Cursor;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    match parse_bars(Path::new("bars.csv"), Cursor::new(bytes)) {
        Ok(mut bars) => {
            if let (Some(_), [first, ..]) = (std::env::var_os("STEPSCOPE_PLANT"), bars.as_mut_slice()) {
                first.low = 2.0 * first.high;
            }
            bars.iter().for_each(keeps_the_rules);
            assert!(bars.windows(2).all(|pair| pair[0].time_ms < pair[1].time_ms), "{bars:?}");
        }
        Err(error) => {
            let message = error.to_string();
            let BarsError::Broken { line, .. } = error else { panic!("bytes in memory can be read: {message}") };
            // A carriage return ends a line, too.
            let lines = 1 + bytes.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count() as u64;
            assert!((1..=lines).contains(&line), "{message}, of {lines} lines");
        }
    }
});

fn keeps_the_rules(bar: &Bar) {
    let Bar { open, high, low, close, volume, .. } = *bar;
    assert!([open, high, low, close].iter().all(|price| price.is_finite() && *price > 0.0), "{bar:?}");
    assert!(low <= open && open <= high && low <= close && close <= high, "{bar:?}");
    assert!(volume.is_finite() && volume >= 0.0, "{bar:?}");
}
