//! Which kernels a piece of code launches, by the library's own trace events.
//!
//! Invariant: only launches of the calling thread count.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Runs `code` and returns the names of the kernels that it launched.
pub(crate) fn launched(code: impl FnOnce()) -> BTreeSet<String> {
    let names = Names::default();
    // While there is one subscriber alone, tracing asks only the thread that comes first whether anybody listens, and keeps its
    // answer for all threads: another test's would silence this one.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(names.clone()), code);
    std::mem::take(&mut *names.0.lock().unwrap())
}

#[derive(Clone, Default)]
struct Names(Arc<Mutex<BTreeSet<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Names {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        event.record(&mut self.clone());
    }
}

impl Visit for Names {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "kernel" {
            self.0.lock().unwrap().insert(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
