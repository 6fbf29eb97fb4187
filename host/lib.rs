#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

/// The guide. Its programs run as tests.
#[cfg(any(doc, doctest))]
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}

pub use stepscope_check::*;
pub use stepscope_core::*;
pub use stepscope_group::*;
#[doc(inline)]
pub use stepscope_models as models;
pub use stepscope_train::*;

/// Compile-time checks of which types cross threads and which are cloneable. Everything that
/// belongs to a step stays on one thread: the stream gives its order, and the scope its lifetime.
#[cfg(test)]
mod threads {
    use super::*;
    use static_assertions::{assert_impl_all, assert_not_impl_any};

    // Types that outlive steps may move to another thread. Types that only read may also be shared.
    assert_impl_all!(Device: Send, Sync, Clone);
    assert_impl_all!(Buffer<f32>: Send, Sync);
    assert_impl_all!(Parameters: Send, Sync);
    assert_impl_all!(Gradients: Send, Sync);
    assert_impl_all!(Optimizer<AdamW>: Send, Sync);
    assert_impl_all!(Optimizer<Sgd>: Send, Sync);
    assert_impl_all!(ParameterGroups: Send, Sync);
    assert_impl_all!(ParameterSpec: Send, Sync, Clone);
    assert_impl_all!(Checkpoint: Send, Sync);
    assert_impl_all!(Recording: Send, Sync);
    assert_impl_all!(ArenaReport: Send, Sync, Clone);
    assert_impl_all!(faults::FaultPlan: Send, Sync, Clone);
    assert_impl_all!(Error: Send, Sync);
    assert_impl_all!(Loader<Vec<f32>>: Send);
    assert_impl_all!(Windows: Send, Sync, Clone);
    // Types that own memory have one owner.
    assert_not_impl_any!(Buffer<f32>: Clone);
    assert_not_impl_any!(Parameters: Clone);
    assert_not_impl_any!(Gradients: Clone);
    assert_not_impl_any!(Optimizer<AdamW>: Clone);
    assert_not_impl_any!(Optimizer<Sgd>: Clone);
    assert_impl_all!(Arena: Send);
    assert_not_impl_any!(Arena: Sync, Clone);

    // Types that belong to a step stay on its thread.
    assert_not_impl_any!(Step<'static>: Send, Sync, Clone);
    assert_not_impl_any!(EagerStep<'static>: Send, Sync, Clone);
    assert_not_impl_any!(ScratchStep<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tensor<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Saved<'static>: Send, Sync);
    assert_not_impl_any!(Lent<'static, 'static>: Send, Sync);
    assert_not_impl_any!(LentMut<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(UpdateArguments<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Tape<'static, 'static>: Send, Sync, Clone);
    assert_not_impl_any!(Var<'static>: Send, Sync);

    // Launch arguments stay on that thread too, and so does every kernel that names memory.
    assert_not_impl_any!(kernel::Slice<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::Pointer<'static, f32>: Send, Sync);
    assert_not_impl_any!(kernel::PointerMut<'static, f32>: Send, Sync, Clone);
    assert_not_impl_any!(kernels::fill::fill<'static, f32>: Send, Sync, Clone);

    // A capture may move wherever its state may. While it is recorded or replayed it stays on one
    // thread. Its inputs and the handles of its outputs are plain values.
    assert_impl_all!(Captured<(), ()>: Send);
    assert_not_impl_any!(Captured<(), ()>: Sync, Clone);
    assert_not_impl_any!(Captured<std::rc::Rc<()>, ()>: Send, Sync);
    assert_not_impl_any!(CaptureInputs<'static>: Send, Sync, Clone);
    assert_not_impl_any!(Replay<'static, ()>: Send, Sync, Clone);
    assert_impl_all!(HostInputs<'static>: Send, Sync);
    assert_impl_all!(Output: Send, Sync, Copy);
    assert_not_impl_any!(DeviceBatch<'static>: Send, Sync);
}
