//! The only place that launches, and the only one that turns tensors into addresses.
//!
//! Invariant: a kernel runs only after its contract has accepted its arguments, on memory that is alive and borrowed
//! for the call. That is why [`Step::launch`] is safe.

use crate::driver::{Device, Fill, Landing};
use crate::error::{Error, Result};
use crate::memory::{Buffer, Request};
use crate::step::Step;
use crate::tensor::{Brand, Element, Saved, Shape, Tensor};
use cuda_std::launch::{Contract, Pointer, PointerMut, Slice, Words};
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::time::Duration;

/// Device memory by address and length: valid for as long as the value that holds it.
pub struct Memory<T> {
    device: u64,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Memory<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<T> {}

impl<T> fmt::Debug for Memory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}[{}]", self.address, self.len)
    }
}

impl<T: Element> Memory<T> {
    /// Memory that the caller owns.
    ///
    /// # Safety
    /// `len` elements at `address` are memory of `device`, aligned for `T`, for as long as any holder of this value lives.
    pub(crate) unsafe fn new(device: &Device, address: u64, len: usize) -> Self {
        Self { device: device.identity(), address, len, element: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// A kernel's `&[T]`, for callers that hold what keeps the memory alive.
    pub(crate) fn as_slice(&self) -> Slice<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { Slice::new(self.device, self.address, self.len) }
    }

    /// A kernel's `*mut T`, for callers that hold the memory alone.
    pub(crate) fn as_out(&self) -> PointerMut<'_, T> {
        // SAFETY: valid by this type's invariant.
        unsafe { PointerMut::new(self.device, self.address, self.len) }
    }

    /// The same memory as elements of another type of the same size.
    pub(crate) fn cast<U: Element>(self) -> Memory<U> {
        const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
        Memory { device: self.device, address: self.address, len: self.len, element: PhantomData }
    }

    /// The part of `len` elements from `start` on.
    ///
    /// # Panics
    /// When it is not inside.
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "{len} elements at {start} of {}", self.len);
        Self { device: self.device, address: self.address + (start * size_of::<T>()) as u64, len, element: PhantomData }
    }

    /// Queues a copy of `values` to the start of the memory.
    ///
    /// # Panics
    /// When they do not fit.
    pub(crate) fn upload(self, device: &Device, values: &[T], deadline: Duration) -> Result<()> {
        self.upload_bytes(None, device, bytemuck::cast_slice(values), deadline)
    }

    /// Queues a copy of `bytes` to the start of the memory; by way of `transit`, which nothing else uses, beside the work queued
    /// before, but for the last step.
    ///
    /// # Panics
    /// When they do not fit into either.
    pub(crate) fn upload_bytes(
        self,
        transit: Option<Self>,
        device: &Device,
        bytes: &[u8],
        deadline: Duration,
    ) -> Result<()> {
        let len = transit.map_or(self.len, |transit| transit.len.min(self.len));
        assert!(bytes.len() <= len * size_of::<T>(), "{} bytes into {len} elements", bytes.len());
        // SAFETY: both memories are valid by this type's invariant, and large enough.
        unsafe { device.upload(self.address, transit.map(|transit| transit.address), bytes, deadline) }
    }

    /// Queues copies of what `fill` writes over all of the memory; see [`Device::upload_with`].
    pub(crate) fn upload_with(
        self,
        device: &Device,
        fill: &Fill<'_>,
        deadline: Duration,
        staged: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the memory is valid by this type's invariant.
        unsafe { device.upload_with(self.address, None, self.len * size_of::<T>(), fill, deadline, staged) }
    }

    /// Waits for the work queued before, until the deadline, and returns all elements.
    pub(crate) fn download(self, device: &Device, deadline: Duration) -> Result<Vec<T>> {
        // SAFETY: the memory is valid by this type's invariant; at the deadline the device is lost, and memory leaks
        // rather than being freed under a copy that may still run.
        let bytes = unsafe { device.download(self.address, self.len * size_of::<T>(), deadline)? };
        Ok(bytemuck::allocation::pod_collect_to_vec(&bytes))
    }

    /// Queues a copy of the only element to the next word of `landing`.
    ///
    /// # Panics
    /// When it is not one element of a word.
    pub(crate) fn land(self, landing: &mut Landing) -> Result<()> {
        const { assert!(size_of::<T>() == size_of::<u32>()) };
        assert_eq!(self.len, 1, "a result of one element");
        // SAFETY: the memory is valid by this type's invariant, and no shorter.
        unsafe { landing.queue(self.address) }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// What a kernel of the step `'s` can read: a [`Tensor`], a [`Saved`] one, or something lent to the step.
pub trait Source<'s, T: Element>: sealed::Sealed {
    /// The extents.
    fn shape(&self) -> Shape;

    #[doc(hidden)]
    fn memory(&self) -> Memory<T>;

    /// A kernel's `&[T]`.
    fn slice(&self) -> Slice<'_, T> {
        let Memory { device, address, len, .. } = self.memory();
        // SAFETY: valid by `Memory`'s invariant; the borrow keeps others from writing it meanwhile.
        unsafe { Slice::new(device, address, len) }
    }

    /// A kernel's `*const T`.
    fn pointer(&self) -> Pointer<'_, T> {
        let Memory { device, address, len, .. } = self.memory();
        // SAFETY: as above.
        unsafe { Pointer::new(device, address, len) }
    }
}

/// What a kernel of the step `'s` can write.
pub trait Target<'s, T: Element>: Source<'s, T> {
    /// A kernel's `*mut T`.
    fn out(&mut self) -> PointerMut<'_, T> {
        let Memory { device, address, len, .. } = self.memory();
        // SAFETY: valid by `Memory`'s invariant; the borrow is unique.
        unsafe { PointerMut::new(device, address, len) }
    }

    /// The same memory as a kernel's `*const T` and its `*mut T`, for a kernel that reads an element before it writes
    /// the same one.
    fn in_place(&mut self) -> (Pointer<'_, T>, PointerMut<'_, T>) {
        let Memory { device, address, len, .. } = self.memory();
        // SAFETY: valid by `Memory`'s invariant; the borrow is unique, and `Pointer` may name what is written.
        unsafe { (Pointer::new(device, address, len), PointerMut::new(device, address, len)) }
    }
}

impl<T: Element> sealed::Sealed for Tensor<'_, T> {}
impl<T: Element> sealed::Sealed for Saved<'_, T> {}
impl<T: Element> sealed::Sealed for Lent<'_, '_, T> {}
impl<T: Element> sealed::Sealed for LentMut<'_, '_, T> {}

/// Memory of a longer life, to be read within the step `'s`: a persistent buffer, or an outer step's tensor.
pub struct Lent<'b, 's, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    borrow: PhantomData<&'b T>,
    brand: Brand<'s>,
}

impl<T: Element> Lent<'_, '_, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, borrow: PhantomData, brand: PhantomData }
    }
}

impl<T: Element> Clone for Lent<'_, '_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for Lent<'_, '_, T> {}

impl<T: Element> fmt::Debug for Lent<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent<{}>{}", T::NAME, self.shape)
    }
}

impl<'s, T: Element> Source<'s, T> for Lent<'_, 's, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

/// Memory of a longer life, to be written within the step `'s`.
pub struct LentMut<'b, 's, T: Element = f32> {
    memory: Memory<T>,
    shape: Shape,
    borrow: PhantomData<&'b mut T>,
    brand: Brand<'s>,
}

impl<T: Element> LentMut<'_, '_, T> {
    pub(crate) fn new(memory: Memory<T>, shape: Shape) -> Self {
        debug_assert_eq!(memory.len(), shape.elements());
        Self { memory, shape, borrow: PhantomData, brand: PhantomData }
    }
}

impl<T: Element> fmt::Debug for LentMut<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentMut<{}>{}", T::NAME, self.shape)
    }
}

impl<'s, T: Element> Source<'s, T> for LentMut<'_, 's, T> {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn memory(&self) -> Memory<T> {
        self.memory
    }
}

impl<'s, T: Element> Target<'s, T> for LentMut<'_, 's, T> {}

impl<'s> Step<'s> {
    /// A tensor whose content is whatever was there: a kernel must write all of it before one reads it.
    ///
    /// # Errors
    /// [`Error::ArenaFull`]; [`Error::Misuse`] when the shape's bytes overflow.
    #[track_caller]
    pub fn empty<T: Element>(&self, shape: impl Into<Shape>) -> Result<Tensor<'s, T>> {
        let shape = shape.into();
        let bytes = shape.checked_elements().and_then(|elements| elements.checked_mul(size_of::<T>()));
        let Some(bytes) = bytes else {
            return Err(Error::misuse("tensor", "a shape whose bytes fit an address", shape.to_string()));
        };
        let request = Request { bytes, shape, element: T::NAME, poison: T::POISON };
        let address = self.region().take(request, Location::caller())?;
        // SAFETY: the region gives these bytes to nobody else until the step is over, and the brand ends with it.
        Ok(Tensor::new(unsafe { Memory::new(self.device(), address, shape.elements()) }, shape))
    }

    /// Queues a kernel, after everything queued before. Does not wait. A grid of no blocks queues nothing.
    ///
    /// # Errors
    /// [`Error::Contract`] when the arguments break the kernel's contract; on the emulator [`Error::Kernel`].
    #[track_caller]
    pub fn launch<K: Contract>(&self, kernel: K) -> Result<()> {
        let launched = launch_within(self.device(), &kernel, self.region().time_left());
        launched.map_err(|error| self.region().with_report(error))
    }
}

/// Queues a kernel on a device; [`Step::launch`] for what is not a step's.
#[track_caller]
pub(crate) fn launch_on<K: Contract>(device: &Device, kernel: &K) -> Result<()> {
    launch_within(device, kernel, device.deadline())
}

#[track_caller]
fn launch_within<K: Contract>(device: &Device, kernel: &K, deadline: Duration) -> Result<()> {
    let entry = kernel.entry().map_err(|violation| Error::Contract { kernel: K::NAME, violation })?;
    let refused = |violation| Error::Contract { kernel: entry.name, violation };
    let grid = kernel.grid().map_err(refused)?;
    let words = Words::of(kernel);
    if !words.all_on(|of_argument| device.reaches(of_argument)) {
        let expected = format!("memory of this device, {}", device.description().name);
        return Err(refused(cuda_std::launch::Violation::new(
            "arguments",
            expected,
            "another device's, or a rehearsal's",
        )));
    }
    if !words.aligned_to(entry.align) {
        let expected = format!("addresses that are multiples of {} bytes", entry.align);
        return Err(refused(cuda_std::launch::Violation::new("arguments", expected, format!("{kernel:?}"))));
    }
    if grid.blocks() == 0 {
        return Ok(());
    }
    let _span = tracing::trace_span!("launch", kernel = entry.name, ?grid).entered();
    // SAFETY: the contract has accepted the arguments, and each borrows memory that is alive on this device: a tensor
    // by its step's brand, a buffer by its own borrow and the device check of `Step::lend`.
    unsafe { device.launch(*entry, grid, words, deadline) }
}

impl<T: Element> Buffer<T> {
    /// The whole buffer as memory; whoever holds it must hold a borrow of the buffer too.
    pub(crate) fn memory(&self) -> Memory<T> {
        // SAFETY: the buffer owns `len` elements at its address until it is dropped.
        unsafe { Memory::new(self.device(), self.address(), self.len()) }
    }
}
