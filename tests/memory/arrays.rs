//! Arrays of the `ndarray` crate: to the device and back, whatever their strides.

#![cfg(feature = "ndarray")]
#![forbid(unsafe_code)]

use crate::support::on_each_device;
use ndarray::{Array, Array0, Array2, Array3, ArrayD, Axis, IxDyn, Slice};
use stepscope::{Arena, Capacity, bf16, ops};

on_each_device! {
    fn arrays_keep_element_order(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let plain = Array3::from_shape_fn((2, 3, 4), |(a, b, c)| (100 * a + 10 * b + c) as f32);
        arena
            .step(|step| {
                assert_eq!(step.read_array(&step.upload_array(plain.view())?)?, plain.clone().into_dyn());
                // Transposed, reversed and cut: none of these arrays is a slice.
                let mut cut = plain.view();
                cut.slice_axis_inplace(Axis(1), Slice::new(0, None, -1));
                cut.slice_axis_inplace(Axis(2), Slice::new(1, None, 2));
                for odd in [plain.view().reversed_axes(), cut] {
                    assert!(odd.as_slice().is_none());
                    let x = step.upload_array(odd)?;
                    assert_eq!(x.shape().extents(), odd.shape());
                    assert_eq!(step.read_array(&ops::scale(step, &x, 2.0)?)?, (&odd * 2.0).into_dyn());
                }
                let labels = Array::from_vec(vec![3u32, 1, 2]);
                assert_eq!(step.read_array(&step.upload_array(labels.view())?)?, labels.into_dyn());
                // Three columns of five, an odd number of halves.
                let mut halves = Array2::from_shape_fn((5, 7), |(row, col)| bf16::from_f32((10 * row + col) as f32));
                halves.slice_axis_inplace(Axis(1), Slice::new(1, None, 2));
                assert!(halves.as_slice().is_none());
                assert_eq!(step.read_array(&step.upload_array(halves.view())?)?, halves.into_dyn());
                let one = Array0::from_elem((), 7.0f32);
                assert_eq!(step.read_array(&step.upload_array(one.view())?)?, one.into_dyn());
                Ok(())
            })
            .unwrap();
    }

    fn seven_extents_refused_empty_arrays_read(device: &Device) {
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let seven = ArrayD::<f32>::zeros(IxDyn(&[1, 1, 2, 1, 1, 1, 1]));
        let error = arena.step(|step| step.upload_array(seven.view()).map(drop)).unwrap_err().to_string();
        assert!(error.contains("at most six extents, got [1, 1, 2, 1, 1, 1, 1]"), "{error}");
        let none = Array2::<f32>::zeros((0, 3));
        let read = arena.step(|step| step.read_array(&step.upload_array(none.view())?)).unwrap();
        assert_eq!(read, none.into_dyn());
    }
}
