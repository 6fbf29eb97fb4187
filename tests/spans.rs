//! The spans of steps, phases, uploads, captures and replays, in order, with their fields.
//!
//! Invariant: a span begins and ends with its work, so a subscriber sees spans nested like the
//! work.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Once;
use stepscope::optim::UpdateTicket;
use stepscope::parameters::Initializer;
use stepscope::tensor::{Indices, Saved};
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceKind, Gradients, HostInputs, Optimizer, Parameter, ParameterSpec, Parameters,
    Result, Step, Tape,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// A recorded span.
#[derive(Clone, Debug)]
struct RecordedSpan {
    depth: usize,
    name: &'static str,
    level: Level,
    fields: BTreeMap<&'static str, String>,
    ended: bool,
}

impl RecordedSpan {
    fn number(&self, field: &str) -> u64 {
        let text = self.fields.get(field).unwrap_or_else(|| panic!("no `{field}` in {self:?}"));
        text.parse().unwrap_or_else(|_| panic!("`{field}` is not a number in {self:?}"))
    }
}

impl Visit for RecordedSpan {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}

thread_local! {
    /// The spans of this thread while it records them, in the order in which they began.
    static SPANS: RefCell<Option<Vec<RecordedSpan>>> = const { RefCell::new(None) };
}

/// The subscriber of the whole program. With one for each thread, another thread's first span could
/// disable that span for all.
struct Listener;

/// The place of a span in the record.
struct SpanIndex(usize);

impl Listener {
    fn change(place: &SpanIndex, change: impl FnOnce(&mut RecordedSpan)) {
        SPANS.with_borrow_mut(|spans| {
            if let Some(spans) = spans {
                change(&mut spans[place.0]);
            }
        });
    }
}

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for Listener {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let depth = span.scope().skip(1).count();
        let mut new = RecordedSpan {
            depth,
            name: span.name(),
            level: *span.metadata().level(),
            fields: BTreeMap::new(),
            ended: false,
        };
        attributes.record(&mut new);
        SPANS.with_borrow_mut(|spans| {
            let Some(spans) = spans else { return };
            span.extensions_mut().insert(SpanIndex(spans.len()));
            spans.push(new);
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(place) = context.span(id).unwrap().extensions().get() {
            Self::change(place, |spans| values.record(spans));
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        if let Some(place) = context.span(&id).unwrap().extensions().get() {
            Self::change(place, |spans| spans.ended = true);
        }
    }
}

/// Returns the spans of `work`, up to a level.
fn listen(level: Level, work: impl FnOnce()) -> Vec<RecordedSpan> {
    static LISTENING: Once = Once::new();
    LISTENING.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Listener)).unwrap();
        // Re-evaluate the spans that other threads have made meanwhile.
        tracing::callsite::rebuild_interest_cache();
    });
    SPANS.set(Some(Vec::new()));
    work();
    let mut spans = SPANS.take().unwrap();
    assert!(spans.iter().all(|span| span.ended), "every span must end: {spans:?}");
    spans.retain(|span| span.level <= level);
    spans
}

/// Returns the names, indented by depth.
fn outline(spans: &[RecordedSpan]) -> Vec<String> {
    spans.iter().map(|span| format!("{}{}", "  ".repeat(span.depth), span.name)).collect()
}

struct Model {
    w: Parameter,
    weights: Parameters,
    gradients: Gradients,
    adamw: Optimizer<AdamW>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let w = spec.add("w", [4, 3], Initializer::fan_in(4));
        let weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap();
        let gradients = Gradients::zeros(&weights).unwrap();
        let adamw = Optimizer::new(&weights, AdamW::default()).unwrap();
        Self { w, weights, gradients, adamw }
    }

    fn train<'s>(
        &mut self,
        ticket: UpdateTicket,
        step: &Step<'s>,
        x: Saved<'s>,
        labels: Indices<'s>,
    ) -> Result<Saved<'s>> {
        let tape = Tape::new(step, &self.weights);
        let loss = tape.cross_entropy(&tape.linear(&tape.input(x), self.w, None)?, labels)?;
        tape.backward_overwrite(&loss, &mut self.gradients)?;
        self.adamw.apply(ticket, step, &mut self.weights, &self.gradients)?;
        Ok(*loss.value())
    }
}

const X: [f32; 8] = [1.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0, 1.0];
const LABELS: [u32; 2] = [0, 2];

fn emulated() -> (Device, Arena) {
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    (device, arena)
}

#[test]
fn steps_record_uploads_and_phases() {
    let (device, mut arena) = emulated();
    let mut model = Model::new(&device);
    let mut step = || {
        let ticket = model.adamw.advance().unwrap();
        arena.step(|step| {
            let (x, labels) = (step.upload(&X, [2, 4])?.save(), step.upload_indices(&LABELS, [2])?);
            model.train(ticket, step, x, labels).map(drop)
        })
    };
    let spans = listen(Level::DEBUG, || (0..2).for_each(|_| step().unwrap()));
    let one = ["upload", "step", "  upload", "  upload", "  forward", "  backward", "  optimizer"];
    assert_eq!(outline(&spans), [one, one].concat());
    let (first, second) = (&spans[1..7], &spans[8..]);
    assert_eq!([&first[0], &second[0]].map(|step| step.number("number")), [0, 1]);
    assert_eq!([&first[1], &first[2]].map(|upload| upload.number("bytes")), [32, 8]);
    // Two inputs, and the results of the passes, each at a multiple of 256 bytes. The last takes
    // the place of a freed one.
    let tensors = first[0].number("tensors");
    assert!(tensors > 2 && first[0].number("bytes") >= 256 * (tensors - 1), "{first:?}");
    assert_eq!(first[0].number("bytes"), arena.report().high_water_bytes as u64);
}

#[test]
fn failed_step_closes_its_spans() {
    let (_, mut arena) = emulated();
    let spans = listen(Level::DEBUG, || {
        arena.step(|step| step.upload(&X, [3, 3]).map(drop)).unwrap_err();
        arena.step(|step| step.upload(&[0.0f32; 1 << 19], [1 << 19]).map(drop)).unwrap_err();
    });
    assert_eq!(outline(&spans), ["step", "step"]);
    assert!(spans.iter().all(|step| !step.fields.contains_key("bytes")), "{spans:?}");
}

#[test]
fn captures_and_replays_have_fields() {
    let (device, mut arena) = emulated();
    let mut model = Model::new(&device);
    let spans = listen(Level::DEBUG, || {
        let inputs = HostInputs::new().with(&X, [2, 4]).unwrap().with(&LABELS, [2]).unwrap();
        let captured = arena.capture(&mut model, &inputs, |step, model, slots| {
            let loss = model.train(UpdateTicket::each_replay(slots), step, slots.input(0)?, slots.indices(1)?)?;
            Ok(slots.output(&loss))
        });
        let mut captured = captured.unwrap();
        captured.state_mut().adamw.advance().unwrap().leave_to_replay();
        captured.replay(&inputs).unwrap();
        captured.state_mut().adamw.advance().unwrap().leave_to_replay();
        captured.repeat().unwrap();
        captured.state_mut().adamw.advance().unwrap().leave_to_replay();
        let one = HostInputs::new().with(&X[..4], [1, 4]).unwrap().with(&LABELS[..1], [1]).unwrap();
        captured.replay(&one).unwrap();
    });
    let capture = ["capture", "  forward", "  backward", "  optimizer", "  forward", "  backward", "  optimizer"];
    let replay = ["replay", "  upload", "  upload"];
    let advance = ["upload"];
    let whole = [&capture[..], &advance, &replay, &advance, &["replay"], &advance, &capture, &replay].concat();
    assert_eq!(outline(&spans), whole);
    let named = |name| spans.iter().filter(move |span| span.name == name);
    let keys = |name| named(name).map(|span| span.fields["key"].as_str()).collect::<Vec<_>>();
    assert_eq!(keys("capture"), ["f32[2, 4] u32[2] #0", "f32[1, 4] u32[1] #0"]);
    assert_eq!(keys("replay"), [keys("capture")[0], keys("capture")[0], keys("capture")[1]]);
    assert_eq!(named("replay").map(|span| span.number("number")).collect::<Vec<_>>(), [0, 1, 2]);
    let kernels: Vec<u64> = named("capture").map(|span| span.number("kernels")).collect();
    assert!(kernels[0] > 3 && named("replay").next().unwrap().number("kernels") == kernels[0], "{spans:?}");
    assert!(named("capture").all(|span| span.number("bytes") >= 256 * (span.number("tensors") - 1)), "{spans:?}");
}

#[test]
fn launches_are_recorded_at_trace_level() {
    let (device, mut arena) = emulated();
    let mut model = Model::new(&device);
    let ticket = model.adamw.advance().unwrap();
    let spans = listen(Level::TRACE, || {
        let step = arena.step(|step| {
            let (x, labels) = (step.upload(&X, [2, 4])?.save(), step.upload_indices(&LABELS, [2])?);
            model.train(ticket, step, x, labels).map(drop)
        });
        step.unwrap();
    });
    let launches: Vec<&RecordedSpan> = spans.iter().filter(|span| span.name == "launch").collect();
    assert!(launches.len() > 3 && launches.iter().all(|launch| launch.depth == 2), "{spans:?}");
    assert!(launches.last().unwrap().fields["kernel"].starts_with("adamw"), "{launches:?}");
}
