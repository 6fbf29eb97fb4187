//! Ranges for NVIDIA's Nsight tools: a `tracing` layer that shows spans, from steps down to
//! launches, on their thread's timeline.
//!
//! Invariant: a range is popped by the thread that pushed it, in reverse order. This crate enters
//! each span once and leaves it on the same thread. Without an attached tool, a range costs a call
//! of an empty function.

#![forbid(unsafe_code)]

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// A layer that turns each span into an NVTX range. A step and its phases are spans of level
/// `DEBUG`, and its launches of level `TRACE`.
///
/// ```
/// use tracing_subscriber::filter::LevelFilter;
/// use tracing_subscriber::prelude::*;
/// let layer = stepscope::check::NvtxLayer.with_filter(LevelFilter::TRACE);
/// tracing_subscriber::registry().with(layer).init();
/// // nsys profile --trace cuda,nvtx program
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct NvtxLayer;

/// The text of a range: the span's name, and its initial fields.
struct Label(String);

impl Label {
    fn new(metadata: &Metadata<'_>) -> Self {
        Self(metadata.name().to_owned())
    }

    fn add(&mut self, field: &Field, value: &dyn Debug) {
        // A range's text ends at the first zero byte.
        let value = format!("{value:?}").replace('\0', "");
        write!(self.0, " {}={value}", field.name()).expect("a string takes all that is written");
    }
}

impl Visit for Label {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, &format_args!("{value}"));
    }
}

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for NvtxLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut label = Label::new(span.metadata());
        attributes.record(&mut label);
        span.extensions_mut().insert(label);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(Label(text)) = span.extensions().get() {
            ::nvtx::range_push!("{text}");
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if span.extensions().get::<Label>().is_some() {
            ::nvtx::range_pop!();
        }
    }
}
