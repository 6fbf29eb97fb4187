//! A contract on a GPU: nothing.

/// Drops its items, because a GPU launches no kernel.
#[macro_export]
macro_rules! only_on_host {
    ($($items:tt)*) => {};
}

/// Ignores a kernel's contract: on the GPU there is nothing to check.
#[macro_export]
macro_rules! contract {
    ($($contract:tt)*) => {};
}
