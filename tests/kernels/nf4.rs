//! Decoding of NF4: kernels and host agree bit for bit, and quantisation finds the nearest values.
//! `tests/models/nf4.rs` compares both with bitsandbytes.

use crate::hostile::attack;
use crate::support::{Random, bits, on_each_device};
use kernels::nf4_format::{BLOCK, DYNAMIC, GROUP, NF4, ZERO_SCALE};
use stepscope::parameters::{FrozenType, Initializer, Nf4Matrix};
use stepscope::tensor::Stored;
use stepscope::{Arena, Capacity, Device, Parameter, ParameterSpec, Parameters, Result, bf16};

/// Inputs, and the outputs of each matrix: one block, blocks across rows, a last block that is
/// shorter, several groups of scales.
const CASES: [(usize, &[usize]); 4] = [(8, &[8]), (24, &[8, 16, 8]), (72, &[24]), (200, &[96, 8])];

fn parameters(device: &Device, inputs: usize, matrices: &[usize], initializer: Initializer) -> (Parameters, Parameter) {
    let mut spec = ParameterSpec::builder();
    let w = spec.add("w", [inputs, matrices.iter().sum()], initializer);
    spec.freeze(|_| Some(FrozenType::Nf4));
    spec.matrices(|_| Some(matrices.to_vec()));
    (Parameters::new(device, &spec.build().unwrap(), 7).unwrap(), w)
}

/// Returns the weights that a step is lent.
fn lent<S: Stored>(device: &Device, parameters: &Parameters, w: Parameter) -> Result<Vec<S>> {
    let mut arena = Arena::builder(device).capacity(Capacity::mib(8)).build()?;
    arena.step(|step| step.read(&parameters.lend_as::<S>(step, w)?))
}

on_each_device! {
    /// Random codes, against the formula.
    fn decoded_by_the_formula(device: &Device) {
        for (inputs, matrices) in CASES {
            let (mut parameters, w) = parameters(device, inputs, matrices, Initializer::ZERO);
            let columns: usize = matrices.iter().sum();
            let (mut want, mut first) = (vec![0.0f32; inputs * columns], 0);
            let mut random = Random::new(inputs as u64);
            for (number, &outputs) in matrices.iter().enumerate() {
                let (weights, blocks) = (inputs * outputs, (inputs * outputs).div_ceil(BLOCK));
                let mut bytes = |count: usize| -> Vec<u8> { (0..count).map(|_| random.next_u64() as u8).collect() };
                let (codes, scales) = (bytes(weights / 2), bytes(blocks));
                let factors = random.normals(blocks.div_ceil(GROUP));
                let matrix = Nf4Matrix { codes: &codes, scales: &scales, factors: &factors, offset: 0.3 };
                parameters.write_nf4(w, number, &matrix).unwrap();
                for output in 0..outputs {
                    for input in 0..inputs {
                        let at = output * inputs + input;
                        let (code, block) = (codes[at / 2] >> (4 * (1 - at % 2)) & 15, at / BLOCK);
                        let step = i32::from(scales[block]) - ZERO_SCALE as i32;
                        let magnitude = DYNAMIC[step.unsigned_abs() as usize] * step.signum() as f32;
                        let scale = magnitude * factors[block / GROUP] + 0.3;
                        want[input * columns + first + output] = NF4[usize::from(code)] * scale;
                    }
                }
                first += outputs;
            }
            assert!(bits(&parameters.read(w).unwrap()) == bits(&want), "{inputs}, {matrices:?}");
            assert!(bits(&lent::<f32>(device, &parameters, w).unwrap()) == bits(&want), "{inputs}, {matrices:?}");
            let narrow: Vec<bf16> = want.iter().map(|&value| bf16::from_f32(value)).collect();
            assert!(parameters.read_as::<bf16>(w).unwrap() == narrow, "{inputs}, {matrices:?}");
            assert!(lent::<bf16>(device, &parameters, w).unwrap() == narrow, "{inputs}, {matrices:?}");
        }
    }

    /// Drawn and written weights are within half a step of their codes. Zeros stay zeros.
    fn quantised_weights_are_near(device: &Device) {
        for (inputs, matrices) in CASES {
            let initializer = Initializer::Normal { deviation: 0.02 };
            let (mut quantised, w) = parameters(device, inputs, matrices, initializer);
            let columns: usize = matrices.iter().sum();
            let mut spec = ParameterSpec::builder();
            let plain = spec.add("w", [inputs, columns], initializer);
            let plain = Parameters::new(device, &spec.build().unwrap(), 7).unwrap().read(plain).unwrap();
            let drawn = quantised.read(w).unwrap();
            quantised.write(w, &plain).unwrap();
            assert_eq!(bits(&quantised.read(w).unwrap()), bits(&drawn));
            // The widest gap of NF4 is 0.304. A scale is off by at most 0.7 % of its factor.
            let largest = plain.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let worst = plain.iter().zip(&drawn).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst > 0.0 && worst <= 0.16 * largest, "{worst} of {largest}");
            quantised.write(w, &vec![0.0; inputs * columns]).unwrap();
            assert!(quantised.read(w).unwrap().iter().all(|&value| value == 0.0));
            assert!(lent::<f32>(device, &quantised, w).unwrap().iter().all(|&value| value == 0.0));
        }
    }
}

/// Returns the error of a parameter in NF4.
fn refusal<const RANK: usize>(shape: [usize; RANK], matrices: &[usize]) -> String {
    let mut spec = ParameterSpec::builder();
    spec.add("w", shape, Initializer::ZERO);
    spec.freeze(|_| Some(FrozenType::Nf4));
    spec.matrices(|_| Some(matrices.to_vec()));
    spec.build().map(drop).unwrap_err().to_string()
}

#[test]
fn other_extents_are_refused() {
    let refused = |error: String, words: &[&str]| assert!(words.iter().all(|word| error.contains(word)), "{error}");
    refused(refusal([12, 8], &[8]), &["multiples of 8 inputs", "`w` [12, 8]"]);
    refused(refusal([8, 12], &[12]), &["multiples of 8 inputs, and of 8 outputs", "`w` [8, 12]"]);
    refused(refusal([8, 16], &[12, 4]), &["in each matrix", "[12, 4]"]);
    refused(refusal([8, 16], &[8]), &["`w` [8, 16] of outputs [8]"]);
    refused(refusal([2, 8, 8], &[8]), &["a matrix [inputs, outputs]", "`w` [2, 8, 8]"]);
}

#[test]
fn other_matrices_are_refused() {
    let device = Device::open(stepscope::DeviceKind::Emulated).unwrap();
    let (mut parameters, w) = parameters(&device, 24, &[8, 16], Initializer::ZERO);
    let before = parameters.frozen_sha256().unwrap();
    let (codes, scales, factors) = ([0; 96], [0; 3], [1.0]);
    let matrix = Nf4Matrix { codes: &codes, scales: &scales, factors: &factors, offset: 0.0 };
    let mut refused = |number: usize, matrix: Nf4Matrix<'_>, word: &str| {
        let error = parameters.write_nf4(w, number, &matrix).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(2, matrix, "one of the 2 matrices of `w`");
    refused(1, matrix, "192 bytes of codes, 6 scales and 1 factors");
    refused(0, Nf4Matrix { codes: &codes[1..], ..matrix }, "95 bytes of codes");
    refused(0, Nf4Matrix { scales: &scales[1..], ..matrix }, "2 scales");
    refused(0, Nf4Matrix { factors: &[], ..matrix }, "0 factors");
    assert_eq!(parameters.frozen_sha256().unwrap(), before);
    parameters.write_nf4(w, 0, &matrix).unwrap();
    assert_ne!(parameters.frozen_sha256().unwrap(), before);
}

attack! {
    nf4::nf4_decode<S> {
        words: u32s 40, inputs: number 16, outputs: number 8, matrices: number 2, columns: number 24, first: number 8,
        out: out_stored 384,
    }
}
