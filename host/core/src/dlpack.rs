//! Exchange of persistent buffers with other libraries through DLPack (feature `dlpack`).
//!
//! [`Buffer::into_dlpack`] gives a buffer away without a copy. [`Buffer::from_dlpack`] copies a
//! foreign tensor.
//!
//! Invariant: no memory is reachable from both sides. No launch, read or graph of this library can
//! use a buffer that was given away. A buffer made from a foreign tensor belongs only to this
//! library.

use crate::buffer::Buffer;
use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use crate::launch::launch_on;
use crate::tensor::{Element, Memory, Shape};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackElement, Managed, ManagedTensorBase};
use kernels::fill::copy;
use std::marker::PhantomData;

/// The alignment that a copy on the GPU needs.
const ALIGN_BYTES: usize = kernels::ALIGN as usize;

impl<T: Element + DlpackElement + Send> Buffer<T> {
    /// Gives the buffer away as a row-major DLPack tensor of this shape, without a copy. `M` is
    /// `DLManagedTensorVersioned`, or `DLManagedTensor` for consumers from before DLPack 1.0.
    /// `into_raw` of the result is the pointer that a Python capsule holds.
    ///
    /// Waits for the work queued before, until the device's deadline, so the consumer need not wait
    /// for anything. The consumer may read and write until it calls the tensor's deleter, from any
    /// thread. The deleter frees the buffer and releases the device. The buffer is passed by value,
    /// so nothing here can use it while the consumer does. To get the data back, copy it with
    /// [`Buffer::from_dlpack`].
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shape has a different number of elements, or a captured step uses
    /// the buffer. [`Error::Timeout`]. The buffer is dropped then, as after any call that takes it
    /// by value.
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
        // SAFETY: the tensor owns the buffer, which owns this many elements at this address, on
        // this device. Nobody else reaches them, as `hand_over` has checked. The tensor owns its
        // shape and strides.
        Ok(unsafe { tensor.finish() })
    }

    /// Makes a buffer that holds a copy of a tensor's elements, in the order of their indices, the
    /// last index fastest. The extents are not kept; read them from `tensor.validate()?.shape()`
    /// first.
    ///
    /// Host memory, pinned or not and with any strides, is uploaded like other values. Memory of
    /// the same GPU is copied on the GPU in stream order, and this call waits for the copy. Such
    /// memory must be row-major and start at a multiple of 16 bytes. The tensor's deleter is called
    /// before this returns, even on an error. The exception is a failed copy on the GPU: the
    /// deleter is then never called, because the GPU may still be reading.
    ///
    /// # Safety
    /// Every element lies in readable memory on the device that the tensor names. Nobody writes it
    /// during the call. For memory of a GPU this includes work that the producer has queued (in
    /// PyTorch, call `torch.cuda.synchronize()` before).
    ///
    /// # Errors
    /// [`Error::Misuse`] for another element type, memory that cannot be read from here, an
    /// unsupported layout, no elements, or a malformed tensor.
    pub unsafe fn from_dlpack<M: ManagedTensorBase>(device: &Device, tensor: Managed<M>) -> Result<Self> {
        let refused = |expected: String, got: String| Err(Error::misuse("from_dlpack", expected, got));
        let malformed = |error: dlpark::tensor::Error| {
            Error::misuse("from_dlpack", "a valid DLPack tensor", format!("a malformed one: {error}"))
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
        // SAFETY: the tensor's data pointer and offset point to its first element. The caller
        // guarantees that every element can be read.
        let first = unsafe { found.offset_bytes_ptr() }.map_err(malformed)?;
        let (elements, extents) = (found.num_elements(), found.shape());
        let strides = found.strides_or_compact().map_err(malformed)?;
        let row_major = is_row_major(extents, &strides);
        let handled = on_host || row_major && first.addr().is_multiple_of(ALIGN_BYTES);
        if !handled {
            let expected =
                format!("row-major elements that start at a multiple of {ALIGN_BYTES} bytes: clone the tensor first");
            return refused(expected, format!("extents {extents:?} with strides {strides:?} at {first:p}"));
        }
        let mut buffer = Self::allocate(device, elements)?;
        if on_host {
            let flat = ([elements as i64], [1]);
            let (extents, strides) = if row_major { (&flat.0[..], &flat.1[..]) } else { (extents, &*strides) };
            let values = Strided::<T> { first: first.cast(), extents, strides, element: PhantomData };
            // SAFETY: the addresses of all elements follow from the extents and strides that
            // `validate` accepted. The caller guarantees that they can be read and that nobody
            // writes them. There are as many as the buffer has.
            buffer.write_with(0, elements, &|offset, place| unsafe { values.read(offset / size_of::<T>(), place) })?;
        } else {
            // SAFETY: this is row-major memory of this GPU. The caller guarantees that it can be
            // read as long as the tensor exists, and the tensor outlives the wait below. If its
            // last word extends past the last element, that word can be read as well, because it
            // lies in one page with the element. The extra half is discarded.
            let values = unsafe { Memory::<T>::new(device.identity(), first.addr() as u64, elements) };
            // Copies by words to keep the bits: a BF16 copy may turn one NaN into another.
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

/// Elements in host memory, at least one, at any alignment, with a stride in elements for each
/// dimension.
struct Strided<'t, T> {
    first: *const u8,
    extents: &'t [i64],
    strides: &'t [i64],
    element: PhantomData<fn() -> T>,
}

// SAFETY: the memory is only read, by `read`, whose caller guarantees that nobody writes it.
unsafe impl<T> Sync for Strided<'_, T> {}

impl<T> Strided<'_, T> {
    /// The address this many elements after another.
    fn behind(from: *const u8, elements: isize) -> *const u8 {
        from.wrapping_offset(elements * size_of::<T>() as isize)
    }

    /// The address of an element, numbered in the order of the indices.
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
    /// There are that many elements, in readable memory that nobody writes.
    unsafe fn read(&self, mut start: usize, place: &mut [u8]) {
        let (Some(&extent), Some(&stride)) = (self.extents.last(), self.strides.last()) else { return };
        let mut left = place;
        while !left.is_empty() {
            // Runs to the end of the innermost dimension.
            let run = (extent as usize - start % extent as usize).min(left.len() / size_of::<T>());
            let (row, rest) = std::mem::take(&mut left).split_at_mut(run * size_of::<T>());
            let from = self.address(start);
            if stride == 1 {
                // SAFETY: `run` contiguous elements start at `from`, all of them the tensor's,
                // which can be read. `row` is our own slot, of as many bytes.
                unsafe { from.copy_to_nonoverlapping(row.as_mut_ptr(), row.len()) };
            } else {
                for (index, element) in row.chunks_exact_mut(size_of::<T>()).enumerate() {
                    let from = Self::behind(from, index as isize * stride as isize);
                    // SAFETY: `index` is inside the innermost dimension, so this is an element of
                    // the tensor, which can be read. `element` is our own memory, of as many bytes.
                    unsafe { from.copy_to_nonoverlapping(element.as_mut_ptr(), size_of::<T>()) };
                }
            }
            (start, left) = (start + run, rest);
        }
    }
}

/// True if the elements are laid out as in our own memory. The stride of a dimension with one index
/// does not matter.
fn is_row_major(extents: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    extents.iter().zip(strides).rev().all(|(&extent, &stride)| {
        let fits = extent == 1 || stride == expected;
        expected = expected.wrapping_mul(extent);
        fits
    })
}

/// Converts a device to DLPack's terms.
fn place(device: &Device) -> DLDevice {
    let description = device.description();
    match description.kind {
        DeviceKind::Cuda => DLDevice::cuda(description.ordinal),
        DeviceKind::Emulated | DeviceKind::Auto => DLDevice::CPU,
    }
}

/// The device's name in PyTorch's terms, if it has one.
fn named(device: DLDevice) -> String {
    match device.device_type {
        DLDeviceType::CUDA => format!("cuda:{}", device.device_id),
        DLDeviceType(other) => format!("DLPack's device type {other}, number {}", device.device_id),
    }
}

/// The element type's name in NumPy's terms, if it has one.
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
