//! Runs the built example with captured and eager steps: the weights are the same, and the report
//! names the mode.

#![forbid(unsafe_code)]

use crate::support::example::{SMALL, run, text, train};
use crate::support::on_each_device;

on_each_device! {
    fn captured_and_eager_weights_match(device: &Device) {
        // Several steps per batch, and a short last batch.
        for micro_batch in ["32", "5"] {
            let (_, captured) = train(device, &["--micro-batch", micro_batch]);
            let (_, eager) = train(device, &["--micro-batch", micro_batch, "--capture", "off"]);
            assert_eq!(captured["weights_sha256"].as_str().map(str::len), Some(64));
            assert_eq!(captured["weights_sha256"], eager["weights_sha256"], "micro-batch {micro_batch}");
            assert_eq!(captured["batches"], eager["batches"]);
            let number = |name: &str| captured["capture"][name].as_u64().unwrap_or_else(|| panic!("{captured}"));
            // There are two batches; the last one is short.
            assert_eq!(captured["batches"].as_array().map(Vec::len), Some(2));
            let steps = if micro_batch == "32" { 2 } else { 7 + 1 };
            assert_eq!(number("replays"), steps, "micro-batch {micro_batch}");
            assert!(number("nodes") > 50 && number("recordings") >= 2 && number("bytes_owned") > 1 << 20);
            assert!(captured["capture"]["record_seconds"].as_f64().unwrap() > 0.0);
            assert_eq!(captured["arena"]["overflow_allocations"], 0);
            assert!(eager["capture"].is_null());
        }
    }

    /// A captured step cannot overflow. The error names the bytes that it needs.
    fn small_arena_error_names_need(device: &Device) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let out = folder.path().join("out");
        let arguments = ["--arena-mib", "1", "--overflow-mib", "4096", "--out", out.to_str().unwrap()];
        let output = run("crossasset", device, &[&SMALL[..], &arguments].concat());
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("capture: the step needs ") && errors.contains("only 1048576 are available"), "{errors}");
        assert!(!out.join("report.json").exists(), "a run that failed wrote a report");
    }
}
