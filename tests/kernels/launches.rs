//! The kernels that a piece of code launches, found by the library's own spans.
//!
//! Invariant: only launches of the calling thread count. One subscriber serves the whole program,
//! because `tracing` checks only once whether a span is wanted, on the first thread that reaches
//! it. With a subscriber for one thread, another thread's first launch would disable the span for
//! all.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Once;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

thread_local! {
    static NAMES: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// Runs `code` and returns the names of the kernels that it launched.
pub(crate) fn launched(code: impl FnOnce()) -> BTreeSet<String> {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        let watch = tracing_subscriber::registry().with(Watch);
        tracing::subscriber::set_global_default(watch).expect("no other subscriber");
        // Re-evaluate the spans of launches that other threads have made meanwhile.
        tracing::callsite::rebuild_interest_cache();
    });
    NAMES.take();
    code();
    NAMES.take()
}

struct Watch;

impl<S: tracing::Subscriber> Layer<S> for Watch {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        attributes.record(&mut Names);
    }
}

struct Names;

impl Visit for Names {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "kernel" {
            NAMES.with_borrow_mut(|names| names.insert(value.to_owned()));
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
