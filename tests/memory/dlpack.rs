//! Buffers given to other libraries and tensors taken from them, by DLPack.
//!
//! Invariant: bits survive, an element keeps its indices, and memory of the other side is freed
//! exactly once. `examples/dlpack` does the same with NumPy.

#![cfg(feature = "dlpack")]

use crate::support::{Random, SPECIAL, bits, on_each_device};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackElement, Managed, ManagedTensorBase, versioned};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::tensor::Shape;
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, Error, HostInputs, bf16, ops};

/// Memory of a library that makes tensors, which counts how often it is freed.
struct Producer<T> {
    values: Vec<T>,
    given_back: Arc<AtomicUsize>,
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.given_back.fetch_add(1, Ordering::SeqCst);
    }
}

/// Returns a host tensor over `values`, whose first element is `values[first]`, with strides in
/// elements, and the number of times that it was freed.
fn foreign<M: ManagedTensorBase, T: DlpackElement + Send>(
    mut values: Vec<T>,
    first: usize,
    extents: &[i64],
    strides: &[i64],
) -> (Managed<M>, Arc<AtomicUsize>) {
    let (data, given_back) = (values.as_mut_ptr(), Arc::default());
    let producer = Producer { values, given_back: Arc::clone(&given_back) };
    assert!(first < producer.values.len().max(1));
    let mut tensor = Dynamic::new(extents, strides).initialize_as::<M>(Box::new(producer)).unwrap();
    tensor.set_data(data.cast()).set_device(DLDevice::CPU).set_dtype(T::DTYPE);
    tensor.set_byte_offset((first * size_of::<T>()) as u64);
    // SAFETY: the producer keeps the values. Each test below chooses extents and strides inside
    // them, or has them refused.
    (unsafe { tensor.finish() }, given_back)
}

/// Returns a tensor of row-major `extents`.
fn plain<T: DlpackElement + Send>(values: Vec<T>, extents: &[i64]) -> (versioned::Dlpack, Arc<AtomicUsize>) {
    let strides = dlpark::tensor::compact_strides(extents).unwrap();
    foreign(values, 0, extents, &strides)
}

/// Returns the text of a refusal, after which the tensor must have been freed.
fn refusal(device: &Device, tensor: versioned::Dlpack, given_back: &AtomicUsize) -> String {
    // SAFETY: the tensor is to be refused, and no element is read.
    let error = unsafe { Buffer::<f32>::from_dlpack(device, tensor) }.unwrap_err();
    assert!(matches!(error, Error::Misuse { .. }), "{error}");
    assert_eq!(given_back.load(Ordering::SeqCst), 1, "{error}");
    error.to_string()
}

/// Returns the same tensor with `change` applied to its description.
fn changed(tensor: versioned::Dlpack, change: impl FnOnce(&mut DLManagedTensorVersioned)) -> versioned::Dlpack {
    // SAFETY: the tensor is alive, and this is its only user.
    change(unsafe { &mut *tensor.as_ptr() });
    tensor
}

fn taken<M: ManagedTensorBase>(device: &Device, tensor: Managed<M>) -> Buffer<f32> {
    // SAFETY: the tensors of this file describe memory of their own, which is not written.
    unsafe { Buffer::from_dlpack(device, tensor) }.unwrap()
}

/// Passes a tensor there and back, and checks the consumer's view.
fn round_trip<M: ManagedTensorBase>(device: &Device, shape: Shape, random: &mut Random) {
    let mut values = random.normals(shape.elements());
    values.iter_mut().zip(SPECIAL).for_each(|(value, special)| *value = special);
    let tensor = Buffer::from_slice(device, &values).unwrap().into_dlpack::<M>(shape).unwrap();
    let seen = tensor.validate_export().unwrap();
    let extents: Vec<i64> = shape.extents().iter().map(|&extent| extent as i64).collect();
    assert_eq!((seen.shape(), seen.dtype()), (&extents[..], DLDataType::F32));
    assert!(seen.is_compact().unwrap());
    let cuda = device.description().kind == DeviceKind::Cuda;
    assert_eq!(seen.device(), if cuda { DLDevice::cuda(device.description().ordinal) } else { DLDevice::CPU });
    assert_eq!(bits(&taken(device, tensor).read().unwrap()), bits(&values), "{shape}");

    let words: Vec<u32> = (0..shape.elements()).map(|_| random.next_u64() as u32).collect();
    let tensor = Buffer::from_slice(device, &words).unwrap().into_dlpack::<M>(shape).unwrap();
    assert_eq!(tensor.validate().unwrap().dtype(), DLDataType::U32);
    // SAFETY: this is our own memory, with no other user.
    let back: Buffer<u32> = unsafe { Buffer::from_dlpack(device, tensor) }.unwrap();
    assert_eq!(back.read().unwrap(), words, "{shape}");

    // All bit patterns, including those of NaNs.
    let halves: Vec<bf16> = words.iter().map(|&word| bf16::from_bits(word as u16)).collect();
    let tensor = Buffer::from_slice(device, &halves).unwrap().into_dlpack::<M>(shape).unwrap();
    assert_eq!(tensor.validate().unwrap().dtype(), DLDataType { code: DLDataTypeCode::BFLOAT, bits: 16, lanes: 1 });
    // SAFETY: as above.
    let back: Buffer<bf16> = unsafe { Buffer::from_dlpack(device, tensor) }.unwrap();
    assert!(back.read().unwrap().iter().zip(&halves).all(|(got, want)| got.to_bits() == want.to_bits()), "{shape}");
}

on_each_device! {
    fn round_trips_keep_bits(device: &Device) {
        let mut random = Random::new(1);
        let fixed: [Shape; 8] = [[].into(), [1].into(), [257].into(), [4097].into(), [0x2_0003].into(), [1, 1, 1, 1].into(), [3, 1].into(), [1, 5].into()];
        for shape in fixed {
            round_trip::<DLManagedTensorVersioned>(device, shape, &mut random);
            round_trip::<DLManagedTensor>(device, shape, &mut random);
        }
        for _ in 0..40 {
            let mut extent = || random.extent(1, 9);
            round_trip::<DLManagedTensorVersioned>(device, [extent(), extent(), extent(), extent()].into(), &mut random);
        }
    }

    fn host_elements_keep_their_indices(device: &Device) {
        let mut random = Random::new(2);
        for case in 0..200 {
            // A view of a row-major array: dimensions in any order, backward, with steps, or
            // repeated.
            let rank = random.extent(0, 5);
            let mut views = Vec::new();
            let (mut below, mut first) = (1usize, 0usize);
            for _ in 0..rank {
                let (extent, every) = (random.extent(1, 6), random.extent(1, 3));
                let stride = (below * every) as i64;
                match random.below(4) {
                    0 => views.push((extent as i64, 0)),
                    1 => {
                        first += (extent - 1) * every * below;
                        views.push((extent as i64, -stride));
                    }
                    _ => views.push((extent as i64, stride)),
                }
                below *= extent * every;
            }
            for last in (1..rank).rev() {
                views.swap(last, random.below(last as u32 + 1) as usize);
            }
            let (extents, strides): (Vec<i64>, Vec<i64>) = views.into_iter().unzip();
            let values = random.normals(below);
            let mut expected = vec![first as i64];
            for (&extent, stride) in extents.iter().zip(&strides) {
                expected = expected.iter().flat_map(|at| (0..extent).map(move |index| at + index * stride)).collect();
            }
            let expected: Vec<f32> = expected.into_iter().map(|at| values[at as usize]).collect();
            let halves: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            let (tensor, _) = foreign::<DLManagedTensorVersioned, _>(halves, first, &extents, &strides);
            // SAFETY: the tensor describes memory of its own, which is not written.
            let got = unsafe { Buffer::<bf16>::from_dlpack(device, tensor) }.unwrap().read().unwrap();
            assert!(got.iter().zip(&expected).all(|(got, &want)| *got == bf16::from_f32(want)), "case {case} of BF16");
            assert_eq!(got.len(), expected.len());
            let (tensor, given_back) = foreign::<DLManagedTensorVersioned, _>(values, first, &extents, &strides);
            let got = taken(device, tensor).read().unwrap();
            assert_eq!(bits(&got), bits(&expected), "case {case}: {extents:?} {strides:?}");
            assert_eq!(given_back.load(Ordering::SeqCst), 1);
        }
    }

    fn large_tensors_pass_in_pieces(device: &Device) {
        // Transposed, and longer than a piece of an upload.
        let (rows, cols) = (1537, 2048);
        let values: Vec<f32> = (0..rows * cols).map(|index| index as f32).collect();
        let expected: Vec<f32> = (0..cols).flat_map(|col| (0..rows).map(move |row| (row * cols + col) as f32)).collect();
        let (tensor, _) = foreign::<DLManagedTensor, _>(values, 0, &[cols as i64, rows as i64], &[1, cols as i64]);
        assert_eq!(taken(device, tensor).read().unwrap(), expected);
    }

    fn old_tensors_need_no_strides(device: &Device) {
        let (tensor, _) = foreign::<DLManagedTensor, _>(vec![1.0f32, 2.0, 3.0, 4.0], 0, &[2, 2], &[2, 1]);
        // SAFETY: the tensor is alive, and this is its only user. Before DLPack 1.2, null strides
        // mean row-major elements.
        unsafe { (*tensor.as_ptr()).dl_tensor.strides = std::ptr::null_mut() };
        assert_eq!(taken(device, tensor).read().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    }

    fn pinned_unaligned_memory_is_read(device: &Device) {
        let values: Vec<u8> = [0.0f32, 1.5, -2.5].iter().flat_map(|value| value.to_ne_bytes()).collect();
        let (tensor, _) = foreign::<DLManagedTensorVersioned, _>([&[0], &values[..]].concat(), 1, &[3], &[1]);
        let tensor = changed(tensor, |tensor| {
            tensor.dl_tensor.dtype = DLDataType::F32;
            tensor.dl_tensor.device.device_type = DLDeviceType::CUDAHOST;
        });
        assert_eq!(taken(device, tensor).read().unwrap(), [0.0, 1.5, -2.5]);
    }

    fn consumer_sees_queued_writes(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let mut buffer = Buffer::<f32>::zeros(device, 1 << 16).unwrap();
        let fill = |value| move |step: &mut stepscope::EagerStep<'_>, buffer: &mut Buffer<f32>| {
            ops::fill_into(step, &mut step.lend_mut(buffer, [1 << 16])?, value)
        };
        for value in [1.0, 2.0, 3.0] {
            arena.step(|step| fill(value)(step, &mut buffer)).unwrap();
        }
        let tensor = buffer.into_dlpack::<DLManagedTensorVersioned>([1 << 16]).unwrap();
        assert_eq!(taken(device, tensor).read().unwrap(), vec![3.0; 1 << 16]);
    }

    fn consumer_frees_once_from_any_thread(device: &Device) {
        let plan = FaultPlan::new();
        let device = Device::builder(device.description().kind).layer(plan.clone()).open().unwrap();
        let buffer = Buffer::from_slice(&device, &[1.0f32, 2.0]).unwrap();
        let before = plan.count(Call::Free);
        let tensor = buffer.into_dlpack::<DLManagedTensorVersioned>([2]).unwrap();
        // The tensor keeps the device open.
        drop(device);
        assert_eq!(plan.count(Call::Free), before);
        let tensor = tensor.into_raw() as usize;
        let consumer = std::thread::spawn(move || {
            let tensor = tensor as *mut DLManagedTensorVersioned;
            // SAFETY: the whole tensor was given away.
            unsafe { (*tensor).deleter.unwrap()(tensor) };
        });
        consumer.join().unwrap();
        assert_eq!(plan.count(Call::Free), before + 1);
    }

    fn unsupported_tensors_are_refused_and_freed(device: &Device) {
        let here = match device.description().kind {
            DeviceKind::Cuda => " or of cuda:0",
            _ => "",
        };
        let refused = |tensor: (versioned::Dlpack, Arc<AtomicUsize>), change: fn(&mut DLManagedTensorVersioned), text: &str| {
            let error = refusal(device, changed(tensor.0, change), &tensor.1);
            assert!(error.ends_with(text), "{error}");
        };
        let four = || plain(vec![1.0f32; 4], &[2, 2]);
        let types = "expected elements of float32: convert them first, got ";
        refused(plain(vec![1.0f64; 4], &[4]), |_| (), &format!("from_dlpack: {types}float64"));
        refused(plain(vec![1i32; 4], &[4]), |_| (), &format!("{types}int32"));
        refused(plain(vec![1u32; 4], &[4]), |_| (), &format!("{types}uint32"));
        refused(plain(vec![bf16::ONE; 4], &[4]), |_| (), &format!("{types}bfloat16"));
        refused(four(), |tensor| tensor.dl_tensor.dtype.lanes = 2, &format!("{types}float32x2"));
        refused(four(), |tensor| tensor.dl_tensor.dtype.code.0 = 77, &format!("{types}DLPack's element type 77 of 32 bits"));
        let places = format!("expected memory of the host{here}: copy it there first, got ");
        refused(four(), |tensor| tensor.dl_tensor.device = DLDevice::cuda(1), &format!("{places}cuda:1"));
        let rocm = |tensor: &mut DLManagedTensorVersioned| {
            tensor.dl_tensor.device = DLDevice { device_type: DLDeviceType::ROCM, device_id: 3 };
        };
        refused(four(), rocm, &format!("{places}DLPack's device type 10, number 3"));
        let malformed = "from_dlpack: expected a valid DLPack tensor, got a malformed one: ";
        let null = format!("{malformed}tensor data pointer is null for a non-empty tensor");
        refused(four(), |tensor| tensor.dl_tensor.data = std::ptr::null_mut(), &null);
        refused(plain(vec![0.0f32; 4], &[4]), |tensor| tensor.dl_tensor.ndim = -1, &format!("{malformed}ndim is negative: -1"));
        refused(foreign(vec![0.0f32; 4], 0, &[2, -2], &[2, 1]), |_| (), "dimension 1 is negative: -2");
        refused(foreign(vec![0.0f32; 4], 0, &[1 << 40, 1 << 40], &[0, 0]), |_| (), "number of elements overflows usize");
        refused(four(), |tensor| tensor.dl_tensor.strides = std::ptr::null_mut(), "requires explicit strides when ndim is 2");
        refused(plain(vec![0.0f32; 4], &[2, 0]), |_| (), "expected at least one element, and a size that fits the address space, got 0");
    }

    fn unsuitable_buffers_are_refused(device: &Device) {
        let buffer = || Buffer::from_slice(device, &[1.0f32; 4]).unwrap();
        let refused = |buffer: Buffer<f32>, shape: Shape| buffer.into_dlpack::<DLManagedTensorVersioned>(shape).map(drop);
        let error = refused(buffer(), [3].into()).unwrap_err().to_string();
        assert_eq!(error, "into_dlpack: expected a shape of 4 elements, got [3]");

        // A graph writes the buffer at any time.
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let mut capture = |buffer| {
            let record = arena.capture(Some(buffer), &HostInputs::new(), |step, buffer, _| {
                ops::fill_into(step, &mut step.lend_mut(buffer.as_mut().unwrap(), [4])?, 2.0)
            });
            record.unwrap()
        };
        let mut captured = capture(buffer());
        let error = refused(captured.state_mut().take().unwrap(), [4].into()).unwrap_err().to_string();
        let expected = "into_dlpack: expected memory that only this device uses, got a buffer that a captured step uses: ";
        assert!(error.starts_with(expected), "{error}");
        captured.replay(&HostInputs::new()).unwrap();
        drop(captured);
        let mut captured = capture(buffer());
        captured.replay(&HostInputs::new()).unwrap();
        let tensor = captured.into_state().unwrap().into_dlpack::<DLManagedTensorVersioned>([4]).unwrap();
        assert_eq!(taken(device, tensor).read().unwrap(), [2.0; 4]);
        // While a step is recorded, only the step reaches the device.
        let recorded = arena.capture((Some(buffer()), 0), &HostInputs::new(), |step, (buffer, runs), _| {
            *runs += 1;
            match buffer {
                Some(buffer) if *runs == 1 => ops::fill_into(step, &mut step.lend_mut(buffer, [4])?, 2.0),
                _ => buffer.take().unwrap().into_dlpack::<DLManagedTensorVersioned>([4]).map(drop),
            }
        });
        let error = recorded.unwrap_err().to_string();
        assert!(error.starts_with("capture: expected only the step's own tensors and kernels"), "{error}");
        // In a dry run, a step has addresses and no memory.
        let measured = arena.measure(|step| {
            let buffer = Buffer::<f32>::zeros(step.device(), 4)?;
            refused(buffer, [4].into())
        });
        let error = measured.unwrap_err().to_string();
        assert!(error.ends_with("a buffer of a dry run, which has no memory"), "{error}");
    }

    fn checked_device_verifies_taken_tensors(device: &Device) {
        let plan = FaultPlan::new().on(Call::Upload, 1, Fault::Flips);
        let device = Device::builder(device.description().kind).checked(true).layer(plan).open().unwrap();
        let (tensor, given_back) = foreign::<DLManagedTensorVersioned, _>(vec![1.0f32; 6], 0, &[3, 2], &[1, 3]);
        // SAFETY: the tensor describes memory of its own, which is not written.
        let error = unsafe { Buffer::<f32>::from_dlpack(&device, tensor) }.unwrap_err();
        assert!(matches!(&error, Error::Damaged { tensor, offset_bytes: 12, .. } if tensor == "f32[6]"), "{error}");
        assert_eq!(given_back.load(Ordering::SeqCst), 1);
    }

    fn hung_device_gives_nothing_away(device: &Device) {
        let plan = FaultPlan::new();
        let deadline = Duration::from_millis(500);
        let kind = device.description().kind;
        let device = Device::builder(kind).deadline(deadline).layer(plan.clone()).open().unwrap();
        let buffer = Buffer::from_slice(&device, &[1.0f32, 2.0]).unwrap();
        let _ = plan.clone().on(Call::Poll, plan.count(Call::Poll) + 1, Fault::Never);
        let error = buffer.into_dlpack::<DLManagedTensorVersioned>([2]).map(drop).unwrap_err();
        assert!(matches!(error, Error::Timeout { call: "synchronize", .. }), "{error}");
        assert!(device.lost().is_some());
        assert_eq!(plan.count(Call::Free), 0, "the buffer was freed while the device may write it");
        let (tensor, given_back) = plain(vec![1.0f32; 4], &[4]);
        // SAFETY: the tensor describes memory of its own, which is not written.
        let error = unsafe { Buffer::<f32>::from_dlpack(&device, tensor) }.unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        assert_eq!(given_back.load(Ordering::SeqCst), 1);
    }
}

/// Zero-copy: the values that the consumer writes come back.
#[test]
fn consumer_writes_in_place() {
    let device = crate::support::open(DeviceKind::Emulated);
    let mut tensor: versioned::Dlpack =
        Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0]).unwrap().into_dlpack([3]).unwrap();
    let mut seen = tensor.validate_mut().unwrap();
    // SAFETY: the tensor owns its memory, which has no other user.
    unsafe { seen.cpu_slice_mut::<f32>() }.unwrap()[1] = 7.0;
    assert_eq!(taken(&device, tensor).read().unwrap(), [1.0, 7.0, 3.0]);
}

#[cfg(feature = "cuda")]
mod memory_of_the_gpu {
    use super::*;

    /// Returns a tensor of the GPU over `1, 2, 3, ..`, with `change` applied.
    fn given(
        device: &Device,
        shape: impl Into<Shape>,
        change: impl FnOnce(&mut DLManagedTensorVersioned),
    ) -> versioned::Dlpack {
        let shape = shape.into();
        let values: Vec<f32> = (1..=shape.elements()).map(|value| value as f32).collect();
        changed(Buffer::from_slice(device, &values).unwrap().into_dlpack(shape).unwrap(), change)
    }

    /// Row-major parts from a multiple of 16 bytes on are copied; others are refused.
    mod is_copied_where_it_lies_in_rows {
        use super::*;

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda() {
            let device = crate::support::open(DeviceKind::Cuda);
            let part = given(&device, [3, 4], |tensor| {
                tensor.dl_tensor.byte_offset = 16;
                // SAFETY: writes the first of the tensor's own two extents.
                unsafe { *tensor.dl_tensor.shape = 2 };
            });
            assert_eq!(taken(&device, part).read().unwrap(), [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]);
            let refused = |tensor| {
                // SAFETY: the tensor is to be refused, and no element is read.
                unsafe { Buffer::<f32>::from_dlpack(&device, tensor) }.unwrap_err().to_string()
            };
            let expected = "from_dlpack: expected row-major elements that start at a multiple of 16 bytes: clone the tensor first, got extents ";
            let error = refused(given(&device, [2, 2], |tensor| {
                // SAFETY: the slice covers the tensor's own two strides.
                unsafe { std::slice::from_raw_parts_mut(tensor.dl_tensor.strides, 2) }.swap(0, 1);
            }));
            assert!(error.starts_with(&format!("{expected}[2, 2] with strides [1, 2] at 0x")), "{error}");
            let error = refused(given(&device, [4], |tensor| {
                tensor.dl_tensor.byte_offset = 4;
                // SAFETY: writes the tensor's own extent.
                unsafe { *tensor.dl_tensor.shape = 3 };
            }));
            assert!(error.starts_with(&format!("{expected}[3] with strides [1] at 0x")), "{error}");
            let error = refused(given(&device, [4], |tensor| tensor.dl_tensor.device.device_id = 1));
            assert!(
                error.ends_with("expected memory of the host or of cuda:0: copy it there first, got cuda:1"),
                "{error}"
            );
        }
    }

    /// The emulator cannot read the GPU's memory.
    mod is_refused_by_the_emulator {
        use super::*;

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda() {
            let tensor = given(&crate::support::open(DeviceKind::Cuda), [4], |_| ());
            // SAFETY: the tensor is to be refused, and no element is read.
            let error =
                unsafe { Buffer::<f32>::from_dlpack(&crate::support::open(DeviceKind::Emulated), tensor) }.unwrap_err();
            assert_eq!(error.to_string(), "from_dlpack: expected memory of the host: copy it there first, got cuda:0");
        }
    }

    /// The GPU may still be reading the memory.
    mod stays_when_a_copy_does_not_end {
        use super::*;

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda() {
            let owner = FaultPlan::new();
            let first = Device::builder(DeviceKind::Cuda).layer(owner.clone()).open().unwrap();
            let tensor = given(&first, [4], |_| ());
            let plan = FaultPlan::new().on(Call::Poll, 1, Fault::Never);
            let second =
                Device::builder(DeviceKind::Cuda).deadline(Duration::from_millis(500)).layer(plan).open().unwrap();
            // SAFETY: the memory belongs to the same GPU, and is not written.
            let error = unsafe { Buffer::<f32>::from_dlpack(&second, tensor) }.unwrap_err();
            assert!(matches!(error, Error::Timeout { call: "synchronize", .. }), "{error}");
            assert_eq!(owner.count(Call::Free), 0);
        }
    }
}
