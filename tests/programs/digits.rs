//! Runs the built examples `digits` and `vit`: they classify unseen handwritten digits correctly.

#![forbid(unsafe_code)]

use crate::support::example::{run, text};
use crate::support::on_each_device;
use std::time::{Duration, Instant};

on_each_device! {
    fn digits_are_learned_quickly(device: &Device) {
        let start = Instant::now();
        let output = run("digits", device, &[]);
        let (screen, errors) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{screen}{errors}");
        assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
        let printed = screen.lines().last().and_then(|line| line.strip_prefix("validation accuracy ")?.strip_suffix(" %"));
        let accuracy: f64 = printed.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{screen}"));
        assert!((95.0..=100.0).contains(&accuracy), "{screen}");
        assert_eq!(screen.lines().count(), 13, "expected a line for each epoch: {screen}");
    }

    fn vision_transformer_learns_digits(device: &Device) {
        let output = run("vit", device, &[]);
        assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
        let output = run("vit", device, &["--epochs", "0"]);
        assert_eq!(output.status.code(), Some(1), "without training the example must fail: {}", text(&output.stdout));
    }

    /// The exit code can report a failure.
    fn without_training_the_program_fails(device: &Device) {
        let output = run("digits", device, &["--epochs", "0"]);
        assert_eq!((output.status.code(), text(&output.stdout).trim()), (Some(1), "validation accuracy 0.0 %"));
    }
}
