//! The coroutines on which a block's threads run, and what a panic on one means.
//!
//! Invariant: a carrier that was not dropped either carries one suspended thread or waits to be given the next.

use super::block::Block;
use super::current;
use super::fault::Cause;
use super::stack::{ColouredStack, STACK_BYTES};
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::any::Any;

/// A coroutine that runs threads of whatever block is current, block after block.
pub(super) struct Carrier {
    coroutine: Coroutine<(), (), (), ColouredStack>,
    yielder: *const Yielder<(), ()>,
}

impl Carrier {
    pub(super) fn new(index: usize) -> Self {
        let stack = ColouredStack::new(index)
            .unwrap_or_else(|error| panic!("no memory for a coroutine stack of {STACK_BYTES} bytes: {error}"));
        let mut carrier = Self {
            coroutine: Coroutine::with_stack(stack, |yielder: &Yielder<(), ()>, ()| {
                loop {
                    current(|block| block.yielder.set(yielder));
                    yielder.suspend(());
                    // SAFETY: `launch`'s caller promised that the words are this kernel's arguments, and `Runner::run`
                    // chose a version that this processor can run.
                    current(|block| unsafe { (block.code)(block.words, block) });
                }
            }),
            yielder: core::ptr::null(),
        };
        carrier.coroutine.resume(());
        carrier.yielder = current(|block| block.yielder.get());
        carrier
    }

    /// Runs until the thread that it carries waits, or no fresh thread is left.
    pub(super) fn resume(&mut self, block: &Block) {
        block.yielder.set(self.yielder);
        let CoroutineResult::Yield(()) = self.coroutine.resume(()) else { unreachable!("a carrier loops for ever") };
    }
}

/// What a kernel's panic means.
pub(super) fn cause(panic: Box<dyn Any + Send>) -> Cause {
    panic.downcast::<Cause>().map_or_else(
        |panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Cause::Panic { message: text.unwrap_or_else(|| "a panic without a message".into()) }
        },
        |cause| *cause,
    )
}
