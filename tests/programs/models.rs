//! Runs the built examples of other models than transformers: each reaches its result.

#![forbid(unsafe_code)]

use crate::support::example::{run, text};
use crate::support::{Random, on_each_device};
use stepscope::Device;

/// Runs an example, which must end with exit code 0, and returns what it printed.
fn succeeds(example: &str, device: &Device, arguments: &[&str]) -> String {
    let output = run(example, device, arguments);
    let screen = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{example}: {screen}{}", text(&output.stderr));
    screen
}

/// Returns the text that small language models learn.
fn page() -> String {
    format!("{}/docs/guide.md", env!("CARGO_MANIFEST_DIR"))
}

on_each_device! {
    fn convolutional_net_learns_digits(device: &Device) {
        succeeds("convnet", device, &[]);
        assert_eq!(run("convnet", device, &["--epochs", "0"]).status.code(), Some(1));
    }

    fn diffusion_draws_digits(device: &Device) {
        let screen = succeeds("diffusion", device, &[]);
        assert_eq!(screen.lines().count(), 10, "eight rows of pixels between two lines: {screen}");
    }

    fn ppo_balances_a_pole(device: &Device) {
        succeeds("ppo", device, &[]);
    }

    fn mixture_of_experts_learns_a_text(device: &Device) {
        succeeds("mixture", device, &[&page()]);
    }

    fn distilled_student_is_better(device: &Device) {
        succeeds("distillation", device, &[&page()]);
    }

    /// The ranges of the bars follow a process with a memory of some hours. Without a memory, the
    /// mean is the best forecast.
    fn lstm_forecasts_ranges(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("bars.csv");
        for (memory, code) in [(0.9, 0), (0.0, 1)] {
            let (mut random, mut state, mut bars) = (Random::new(3), 0.0, "high,low\n".to_owned());
            for _ in 0..2000 {
                let noise = random.normals(2);
                state = memory * state + (1.0_f32 - memory * memory).sqrt() * noise[0];
                let range = 1e-3 * (state + 0.3 * noise[1]).exp();
                bars += &format!("{},100\n", 100.0 * (1.0 + range)).repeat(15);
            }
            std::fs::write(&file, bars).unwrap();
            let output = run("lstm", device, &[file.to_str().unwrap()]);
            assert_eq!(output.status.code(), Some(code), "{memory}: {}{}", text(&output.stdout), text(&output.stderr));
        }
    }
}
