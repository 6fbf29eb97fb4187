//! Limits on the recordings that a captured step keeps, their eviction order, and the warnings
//! logged when evicted shapes return.
//!
//! Invariant: whatever is evicted, the bits are those of steps that run launch by launch.

#![forbid(unsafe_code)]

use crate::support::{Random, on_each_device};
use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;
use stepscope::capture::{CaptureReport, Captured, Output, Record};
use stepscope::nn::Linear;
use stepscope::ops;
use stepscope::prelude::*;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

thread_local! {
    /// The warnings of this thread.
    static WARNINGS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

struct Listener;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl<S: tracing::Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == tracing::Level::WARN {
            let mut line = Line(String::new());
            event.record(&mut line);
            WARNINGS.with_borrow_mut(|warnings| warnings.push(line.0));
        }
    }
}

/// Returns this thread's warnings about recordings while `work` runs.
fn warnings(work: impl FnOnce()) -> Vec<String> {
    static LISTENING: Once = Once::new();
    LISTENING.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Listener)).unwrap();
        tracing::callsite::rebuild_interest_cache();
    });
    WARNINGS.take();
    work();
    WARNINGS.take().into_iter().filter(|line| line.contains("recorded again and again")).collect()
}

fn arena(device: &Device) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(4)).build().unwrap()
}

struct Classifier(Linear);

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

type Points = crate::support::points::Points<6>;

/// Returns a batch of this many points.
fn batch(samples: usize) -> Points {
    let mut random = Random::new(samples as u64);
    Points { x: random.normals(6 * samples), labels: random.belows(samples, 3) }
}

/// Returns the weights after updates with batches of these sizes, and the report of the captured
/// step.
fn train(device: &Device, sizes: &[usize], captured: bool, kept: Option<usize>) -> (String, Option<CaptureReport>) {
    let mut spec = ParameterSpec::builder();
    let model = Classifier(Linear::new(spec.at("head"), 6, 3));
    let config = AdamW { learning_rate: 0.05, ..AdamW::default() };
    let state = TrainState::new(device, model, &spec.build().unwrap(), 7, config).unwrap();
    let mut arena = arena(device);
    let largest = sizes.iter().copied().max().unwrap();
    let mut trainer = match captured {
        true => Trainer::captured(&mut arena, state, &batch(largest)).unwrap(),
        false => Trainer::eager(&mut arena, state),
    };
    if let Some(kept) = kept {
        trainer = trainer.recordings(kept);
    }
    for &size in sizes {
        trainer.update(&[batch(size)]).unwrap();
    }
    (trainer.state().parameters.sha256().unwrap(), trainer.capture_report())
}

/// Returns the sizes 1 to `shapes`, `rounds` times. The largest comes first, because it is recorded
/// before training.
fn alternating(shapes: usize, rounds: usize) -> Vec<usize> {
    (0..rounds).flat_map(|_| (1..=shapes).rev()).collect()
}

/// Captures a step that returns the sum of its input.
fn sums(device: &Device, largest: usize) -> (Arena, Captured<(), Output>) {
    let mut arena = arena(device);
    let record: Record<(), Output> = |step, (), slots| Ok(slots.output(&ops::sum(step, &slots.input::<f32>(0)?)?));
    let x = vec![1.0; largest];
    let captured = arena.capture((), &HostInputs::new().with(&x, [largest]).unwrap(), record).unwrap();
    (arena, captured)
}

/// Returns the sum of `len` ones, by a replay.
fn sum(captured: &mut Captured<(), Output>, len: usize) -> f32 {
    let x = vec![1.0; len];
    let replay = captured.replay(&HostInputs::new().with(&x, [len]).unwrap()).unwrap();
    replay.read_scalar(*replay.outputs()).unwrap()
}

on_each_device! {
    also late;

    fn alternating_shapes_are_replayed(device: &Device) {
        for shapes in [5, 20, 32] {
            let sizes = alternating(shapes, 3);
            let logged = warnings(|| {
                let (digest, report) = train(device, &sizes, true, None);
                let CaptureReport { recordings, replays, evictions, kept, .. } = report.unwrap();
                assert_eq!((recordings, replays, evictions, kept), (shapes as u64, sizes.len() as u64, 0, 32));
                assert_eq!(digest, train(device, &sizes, false, None).0, "with {shapes} shapes the captured digest differs");
            });
            assert_eq!(logged, [""; 0]);
        }
    }

    /// Keeps fewer recordings than there are shapes: the bits are the same, and one warning names
    /// the setting to change.
    fn too_few_recordings(device: &Device) {
        for (shapes, kept, rounds) in [(5, 4, 4), (20, 4, 2), (3, 1, 3)] {
            let sizes = alternating(shapes, rounds);
            let logged = warnings(|| {
                let (digest, report) = train(device, &sizes, true, Some(kept));
                let report = report.unwrap();
                assert_eq!(report.recordings, sizes.len() as u64, "each size is recorded anew: {report:?}");
                assert_eq!((report.kept, report.evictions), (kept, report.recordings - kept as u64));
                assert_eq!(digest, train(device, &sizes, false, Some(kept)).0);
            });
            let [line] = &logged[..] else { panic!("expected one warning, got {logged:?}") };
            for words in [format!("kept={kept} "), "f32[".into(), "`Trainer::recordings`".into(), "pad the inputs".into()] {
                assert!(line.contains(&words), "{words}: {line}");
            }
        }
    }

    /// The least recently used recording is evicted first. A larger limit keeps existing
    /// recordings, and a smaller one evicts at once.
    fn least_recently_used_is_evicted(device: &Device) {
        let (_arena, captured) = sums(device, 9);
        let mut captured = captured.keep(3);
        let recordings = |captured: &mut Captured<(), Output>, len: usize| {
            assert_eq!(sum(captured, len), len as f32);
            captured.report().recordings
        };
        for (len, expected) in [(9, 1), (1, 2), (2, 3), (9, 3), (3, 4), (9, 4), (2, 4), (1, 5), (2, 5), (9, 5), (3, 6)] {
            assert_eq!(recordings(&mut captured, len), expected, "{len}");
        }
        let mut captured = captured.keep(5);
        for (len, expected) in [(2, 6), (9, 6), (3, 6), (4, 7), (5, 8), (2, 8), (6, 9), (9, 10)] {
            assert_eq!(recordings(&mut captured, len), expected, "{len}");
        }
        let mut captured = captured.keep(0);
        assert_eq!((captured.report().kept, captured.report().evictions), (1, 9));
        for (len, expected) in [(9, 10), (6, 11), (9, 12), (9, 12)] {
            assert_eq!(recordings(&mut captured, len), expected, "{len}");
        }
        // `repeat` runs the recording that is left.
        let replay = captured.repeat().unwrap();
        assert_eq!(replay.read_scalar(*replay.outputs()).unwrap(), 9.0);
    }

    /// Shapes that never return cause a warning too, once one more has been evicted than are kept.
    fn unrepeated_shapes_are_warned_about(device: &Device) {
        let logged = warnings(|| {
            let (_arena, captured) = sums(device, 40);
            let mut captured = captured.keep(4);
            (1..=8).for_each(|len| assert_eq!(sum(&mut captured, len), len as f32));
            assert_eq!(captured.report().evictions, 5);
        });
        assert_eq!(logged.len(), 1, "{logged:?}");
        let logged = warnings(|| {
            let (_arena, captured) = sums(device, 40);
            let mut captured = captured.keep(4);
            (1..=7).for_each(|len| assert_eq!(sum(&mut captured, len), len as f32));
        });
        assert_eq!(logged, [""; 0], "a few new shapes at the end of an epoch cause no warning");
    }

    /// A shape that needs more than the capture owns evicts nothing.
    fn refused_shapes_evict_nothing(device: &Device) {
        let (_arena, mut captured) = sums(device, 64);
        assert_eq!(sum(&mut captured, 3), 3.0);
        let x = vec![1.0; 4096];
        let error = captured.replay(&HostInputs::new().with(&x, [4096]).unwrap()).err().unwrap();
        assert!(matches!(error, Error::CaptureNeeds { .. }), "{error}");
        assert_eq!((sum(&mut captured, 64), sum(&mut captured, 3)), (64.0, 3.0));
        let report = captured.report();
        assert_eq!((report.recordings, report.evictions), (2, 0));
    }
}
