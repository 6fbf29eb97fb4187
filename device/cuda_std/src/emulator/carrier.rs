//! The coroutines on which a block's threads run, and the interpretation of their panics.
//!
//! Invariant: a live carrier either carries one suspended thread, or waits for the next thread.

use super::block::Block;
use super::fault::Cause;
use super::trap::Traps;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(not(miri))]
pub(super) use coroutine::Carrier;
#[cfg(miri)]
pub(super) use plain::Carrier;

#[cfg(not(miri))]
mod coroutine {
    use super::super::current;
    use super::super::stack::{ColouredStack, STACK_BYTES};
    use super::super::trap::Trap;
    use super::{Block, Traps};
    use corosensei::stack::Stack;
    use corosensei::{Coroutine, CoroutineResult, Yielder};
    use std::panic::resume_unwind;

    /// A coroutine that runs threads of the current block, block after block.
    pub(in super::super) struct Carrier {
        coroutine: Coroutine<(), (), (), ColouredStack>,
        yielder: *const Yielder<(), ()>,
    }

    impl Carrier {
        pub(in super::super) fn new(index: usize, traps: &Traps) -> Self {
            let stack = ColouredStack::new(index)
                .unwrap_or_else(|error| panic!("no memory for a coroutine stack of {STACK_BYTES} bytes: {error}"));
            let limit = stack.limit().get();
            let mut carrier = Self {
                coroutine: Coroutine::with_stack(stack, |yielder: &Yielder<(), ()>, ()| {
                    loop {
                        current(|block| block.yielder.set(yielder));
                        yielder.suspend(());
                        // SAFETY: the caller of `Machine::launch` guaranteed that the words are
                        // this kernel's arguments. `Runner::run` selected a version that this
                        // processor can run.
                        current(|block| unsafe { (block.code)(block.words, block) });
                    }
                }),
                yielder: core::ptr::null(),
            };
            carrier.coroutine.resume(());
            carrier.yielder = current(|block| block.yielder.get());
            traps.add(Trap { handler: carrier.coroutine.trap_handler(), limit });
            carrier
        }

        /// Runs until a thread that it carries waits, or no fresh thread is left.
        #[inline(always)]
        pub(in super::super) fn resume(&mut self, block: &Block) {
            block.yielder.set(self.yielder);
            match self.coroutine.resume(()) {
                CoroutineResult::Yield(()) => {}
                // The coroutine loops for ever, unless a fault's handler ends it.
                CoroutineResult::Return(()) => resume_unwind(Box::new(block.traps.cause(block))),
            }
        }
    }
}

/// The stub for Miri, which runs no assembly, so stacks cannot be switched: a thread that waits is
/// an error.
#[cfg(miri)]
mod plain {
    use super::{Block, Traps};

    pub(in super::super) struct Carrier;

    impl Carrier {
        pub(in super::super) fn new(_: usize, _: &Traps) -> Self {
            Self
        }

        pub(in super::super) fn resume(&mut self, block: &Block) {
            // SAFETY: the words are this kernel's arguments, as on a coroutine, and every processor
            // can run this version.
            unsafe { (block.code)(block.words, block) };
        }
    }
}

/// Converts a kernel's panic to the cause of a fault.
pub(super) fn cause(panic: Box<dyn Any + Send>) -> Cause {
    let panic = match panic.downcast::<Cause>() {
        Ok(cause) => return *cause,
        Err(panic) => panic,
    };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
    // The payload of a kernel's panic may panic when it is dropped.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(another);
    }
    Cause::Panic { message: text.unwrap_or_else(|| "a panic without a message".into()) }
}
