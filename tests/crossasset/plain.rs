//! The model of primitives computes what the model of fused layers computes, and so do its
//! gradients.

use crate::model::{self, Sizes};
use crate::plain;
use crate::sizes::{FEATURES, SCALES};
use crate::support::{Random, on_each_device, relative_l2};
use std::collections::BTreeMap;
use stepscope::parameters::ParameterEntry;
use stepscope::{Arena, Capacity, Device, Gradients, HostInputs, Model, ParameterSpec, Parameters, Result, Tape};

const SIZES: Sizes = Sizes { width: 128, hidden: 256, layers: 2 };
const BATCH: usize = 3;
/// The limit of `tests/oracle/oracle.py` for the traces of CrossAsset.
const LIMIT: f64 = 2e-6;

/// Returns the logits and the gradients, by name, for weights that follow from their names.
fn computed<M: Model>(device: &Device, (model, spec): (M, ParameterSpec)) -> BTreeMap<String, Vec<f32>> {
    let mut parameters = Parameters::new(device, &spec, 0).unwrap();
    for (parameter, entry) in spec.iter() {
        let seed = entry.name().bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut values = Random::new(seed).normals(entry.shape().elements());
        values.iter_mut().for_each(|value| *value *= 0.1);
        parameters.write(parameter, &values).unwrap();
    }
    let mut random = Random::new(5);
    let (x, labels) = (random.normals(BATCH * SCALES.len() * FEATURES), [2u32, 0, 1]);
    let inputs = HostInputs::new().with(&x, [BATCH, SCALES.len(), FEATURES]).unwrap().with(&labels, [BATCH]).unwrap();
    let mut gradients = Gradients::zeros(&parameters).unwrap();
    let mut arena = Arena::builder(device).capacity(Capacity::mib(64)).build().unwrap();
    let logits: Result<_> = arena.step(|step| {
        let batch = step.upload_inputs(&inputs)?;
        let tape = Tape::new(step, &parameters);
        let logits = model.forward(&tape, &batch)?;
        let loss = model.loss(&tape, &logits, &batch)?;
        tape.backward(&loss, &mut gradients)?;
        step.read(logits.value())
    });
    let gradient =
        |(parameter, entry): (_, &ParameterEntry)| (entry.name().to_owned(), gradients.read(parameter).unwrap());
    spec.iter().map(gradient).chain([("logits".to_owned(), logits.unwrap())]).collect()
}

on_each_device! {
    fn primitives_match_fused_layers(device: &Device) {
        let plain = computed(device, plain::Model::sized(SIZES).unwrap());
        let fused = computed(device, model::Model::<f32>::sized(SIZES).unwrap());
        assert!(plain.keys().eq(fused.keys()), "{:?} and {:?}", plain.keys(), fused.keys());
        for (name, fused) in fused {
            let fused: Vec<f64> = fused.into_iter().map(f64::from).collect();
            let error = relative_l2(&plain[&name], &fused);
            assert!(error <= LIMIT, "{name}: {error:.2e}");
            assert!(fused.iter().any(|&value| value != 0.0), "{name} is zero");
        }
    }
}
