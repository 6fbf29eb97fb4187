//! Persistent buffers as tensors of other libraries, and the other way round, by DLPack (feature `dlpack`).
//!
//! A buffer is given away as it is, without a copy: [`Buffer::into_dlpack`]. What comes from elsewhere is copied:
//! [`Buffer::from_dlpack`]. Invariant: no memory is reached from both sides. What was given away, no launch, read or graph of ours
//! can name; what was taken is ours alone.

use crate::driver::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::memory::Buffer;
use crate::tensor::{Element, Memory, Shape};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackElement, Managed, ManagedTensorBase};
use kernels::fill::copy;
use std::marker::PhantomData;

/// What a copy on the GPU needs.
const ALIGN_BYTES: usize = kernels::ALIGN as usize;

impl<T: Element + DlpackElement + Send> Buffer<T> {
    /// Gives the buffer away as a row-major DLPack tensor of this shape, without a copy. `M` is `DLManagedTensorVersioned`, or
    /// `DLManagedTensor` for consumers from before DLPack 1.0; `into_raw` of the result is what a Python capsule holds.
    ///
    /// Waits for the work queued before, until the device's deadline: the consumer need not wait for anything. It may read and
    /// write until it calls the tensor's deleter, from any thread, which frees the buffer and lets go of the device. That is why
    /// the buffer goes: nothing here can use it while somebody else does. What is to come back is copied, by
    /// [`Buffer::from_dlpack`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has another number of elements, or a captured step uses the buffer;
    /// [`Error::Timeout`]. The buffer is gone then, as after any call that takes it.
    ///
    /// ```
    /// use dlpark::versioned::Dlpack;
    /// use stepscope::{Buffer, Device, DeviceKind};
    ///
    /// let device = Device::open(DeviceKind::Emulated)?;
    /// let tensor: Dlpack = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0, 4.0])?.into_dlpack([2, 2])?;
    /// assert_eq!(tensor.validate().unwrap().shape(), [2, 2]);
    /// // SAFETY: nobody else has the tensor.
    /// let back = unsafe { Buffer::<f32>::from_dlpack(&device, tensor)? };
    /// assert_eq!(back.read()?, [1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), stepscope::Error>(())
    /// ```
    pub fn into_dlpack<M: ManagedTensorBase>(self, shape: impl Into<Shape>) -> Result<Managed<M>> {
        let shape = shape.into();
        if shape.checked_elements() != Some(self.len()) {
            let expected = format!("a shape of {} elements", self.len());
            return Err(Error::misuse("into_dlpack", expected, shape.to_string()));
        }
        self.device().hand_over(self.address(), self.bytes())?;
        let (address, place) = (self.address(), place(self.device()));
        let mut tensor = Dynamic::compact(shape.extents())
            .initialize_as::<M>(Box::new(self))
            .expect("extents of memory that exists are small");
        tensor.set_data(address as *mut _).set_device(place).set_dtype(T::DTYPE);
        // SAFETY: the tensor owns the buffer, which owns so many elements at this address, on this device; nobody else reaches
        // them, as `hand_over` has shown. The shape and its strides are the tensor's own.
        Ok(unsafe { tensor.finish() })
    }

    /// A buffer that holds a copy of a tensor's elements, in the order of their indices, the last one fastest. Extents are not kept:
    /// `tensor.validate()?.shape()` tells them before.
    ///
    /// Memory of the host, page-locked or not, with whatever strides, is uploaded like any other values. Memory of the same GPU
    /// is copied there, in the order of the stream, and the copy waited for; it must be row-major and start at a multiple of
    /// 16 bytes. The tensor's deleter is called before this returns, also with an error; but it is never called
    /// when a copy on the GPU has failed, because the GPU may still be reading.
    ///
    /// # Safety
    /// Every element lies in memory that may be read, on the device that the tensor names. Nobody writes it meanwhile; for
    /// memory of a GPU this includes work that the producer has queued (in PyTorch: call `torch.cuda.synchronize()` before).
    ///
    /// # Errors
    /// [`Error::Misuse`] for another element type, memory that cannot be read from here, elements that are laid out in a way
    /// that is not handled, none at all, or a malformed tensor; as for [`Buffer::from_slice`].
    pub unsafe fn from_dlpack<M: ManagedTensorBase>(device: &Device, tensor: Managed<M>) -> Result<Self> {
        let refused = |expected: String, got: String| Err(Error::misuse("from_dlpack", expected, got));
        let malformed = |error: dlpark::tensor::Error| {
            Error::misuse("from_dlpack", "a tensor as DLPack defines it", format!("one of which {error}"))
        };
        let found = tensor.validate().map_err(malformed)?;
        if found.dtype() != T::DTYPE {
            return refused(format!("elements of {}: convert them first", element(T::DTYPE)), element(found.dtype()));
        }
        let here = place(device);
        let on_host = matches!(found.device().device_type, DLDeviceType::CPU | DLDeviceType::CUDAHOST);
        if !on_host && found.device() != here {
            let or_here = if here == DLDevice::CPU { String::new() } else { format!(" or of {}", named(here)) };
            return refused(format!("memory of the host{or_here}: copy it there first"), named(found.device()));
        }
        // SAFETY: the tensor's data pointer and offset name its first element (this function asks that every element can be read).
        let first = unsafe { found.offset_bytes_ptr() }.map_err(malformed)?;
        let (elements, extents) = (found.num_elements(), found.shape());
        let strides = found.strides_or_compact().map_err(malformed)?;
        let row_major = is_row_major(extents, &strides);
        let handled = on_host || row_major && first.addr().is_multiple_of(ALIGN_BYTES);
        if !handled {
            let expected =
                format!("row-major elements from a multiple of {ALIGN_BYTES} bytes on: clone the tensor first");
            return refused(expected, format!("extents {extents:?} with strides {strides:?} at {first:p}"));
        }
        let mut buffer = Self::allocate(device, elements)?;
        if on_host {
            let flat = ([elements as i64], [1]);
            let (extents, strides) = if row_major { (&flat.0[..], &flat.1[..]) } else { (extents, &*strides) };
            let values = Strided::<T> { first: first.cast(), extents, strides, element: PhantomData };
            // SAFETY: the places of all elements follow from the extents and strides that `validate` accepted; they can be read, and
            // nobody writes them, as this function asks. There are as many as the buffer has.
            buffer.write_with(0, elements, &|offset, place| unsafe { values.read(offset / size_of::<T>(), place) })?;
        } else {
            // SAFETY: memory of this GPU, row-major, that can be read for as long as the tensor is there, as this function asks; the
            // tensor outlives the wait below. Where its last word has room behind the last element, the word can be read as well: it
            // lies in one page with the element. What that half holds is ours to drop.
            let values = unsafe { Memory::<T>::new(device.identity(), first.addr() as u64, elements) };
            // By words, since bits are to survive: a copy of BF16 may make another NaN of one.
            let (from, to) = (values.words().cast::<f32>(), buffer.memory().words().cast());
            let queued = launch_on(device, &copy { x: from.as_slice(), out: to.as_out() });
            if let Err(error) = queued.and_then(|()| device.synchronize(device.deadline())) {
                std::mem::forget(tensor);
                return Err(error);
            }
        }
        Ok(buffer)
    }
}

/// Elements in memory of the host, at least one, at any alignment, so many elements apart in each dimension.
struct Strided<'t, T> {
    first: *const u8,
    extents: &'t [i64],
    strides: &'t [i64],
    element: PhantomData<fn() -> T>,
}

// SAFETY: it is only read, by `read`, whose caller promises that nobody writes.
unsafe impl<T> Sync for Strided<'_, T> {}

impl<T> Strided<'_, T> {
    /// The address so many elements behind another.
    fn behind(from: *const u8, elements: isize) -> *const u8 {
        from.wrapping_offset(elements * size_of::<T>() as isize)
    }

    /// Where an element is, counted in the order of the indices.
    fn address(&self, mut element: usize) -> *const u8 {
        self.extents.iter().zip(self.strides).rev().fold(self.first, |address, (&extent, &stride)| {
            let index = element % extent as usize;
            element /= extent as usize;
            Self::behind(address, index as isize * stride as isize)
        })
    }

    /// Fills `place` with the elements from `start` on.
    ///
    /// # Safety
    /// There are so many, in memory that may be read and that nobody writes.
    unsafe fn read(&self, mut start: usize, place: &mut [u8]) {
        let (Some(&extent), Some(&stride)) = (self.extents.last(), self.strides.last()) else { return };
        let mut left = place;
        while !left.is_empty() {
            // To the end of the innermost dimension.
            let run = (extent as usize - start % extent as usize).min(left.len() / size_of::<T>());
            let (row, rest) = std::mem::take(&mut left).split_at_mut(run * size_of::<T>());
            let from = self.address(start);
            if stride == 1 {
                // SAFETY: `run` elements lie side by side from `from` on, all of them the tensor's, which can be read; `row` is a slot of
                // ours, of as many bytes.
                unsafe { from.copy_to_nonoverlapping(row.as_mut_ptr(), row.len()) };
            } else {
                for (index, element) in row.chunks_exact_mut(size_of::<T>()).enumerate() {
                    let from = Self::behind(from, index as isize * stride as isize);
                    // SAFETY: `index` is inside the innermost dimension, so this is an element of the tensor, which can be read; `element`
                    // is a place of ours, of as many bytes.
                    unsafe { from.copy_to_nonoverlapping(element.as_mut_ptr(), size_of::<T>()) };
                }
            }
            (start, left) = (start + run, rest);
        }
    }
}

/// Whether elements lie as in our own memory; how far apart the only index of a dimension is does not matter.
fn is_row_major(extents: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    extents.iter().zip(strides).rev().all(|(&extent, &stride)| {
        let fits = extent == 1 || stride == expected;
        expected = expected.wrapping_mul(extent);
        fits
    })
}

/// A device in DLPack's terms.
fn place(device: &Device) -> DLDevice {
    let description = device.description();
    match description.kind {
        DeviceKind::Cuda => DLDevice::cuda(description.ordinal),
        DeviceKind::Emulated | DeviceKind::Auto => DLDevice::CPU,
    }
}

/// A device in PyTorch's terms, where it has one.
fn named(device: DLDevice) -> String {
    match device.device_type {
        DLDeviceType::CUDA => format!("cuda:{}", device.device_id),
        DLDeviceType(other) => format!("DLPack's device type {other}, number {}", device.device_id),
    }
}

/// An element type in NumPy's terms, where it has one.
fn element(DLDataType { code, bits, lanes }: DLDataType) -> String {
    let kind = match code {
        DLDataTypeCode::INT => "int",
        DLDataTypeCode::UINT => "uint",
        DLDataTypeCode::FLOAT => "float",
        DLDataTypeCode::BFLOAT => "bfloat",
        DLDataTypeCode::COMPLEX => "complex",
        DLDataTypeCode::BOOL => "bool",
        DLDataTypeCode(other) => return format!("DLPack's element type {other} of {bits} bits"),
    };
    let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
    format!("{kind}{bits}{lanes}")
}
