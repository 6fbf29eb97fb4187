//! Checkpoints: a resumed run has the bits of an uninterrupted one, and a failure leaves the old
//! file unchanged.

#![forbid(unsafe_code)]

use safetensors::tensor::{Dtype, TensorView};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use crate::support::{Random, bits, on_each_device, words};
use stepscope::error::Quantity;
use stepscope::optim::Schedule;
use stepscope::parameters::Initializer;
use stepscope::upload::{NonFinite, Transfer};
use stepscope::{
    AdamW, Arena, Capacity, Checkpoint, Device, DeviceKind, Error, Gradients, Optimizer, Parameter, ParameterSpec,
    Parameters, Result, Tape,
};
use tempfile::TempDir;

const FEATURES: usize = 7;
const HIDDEN: usize = 33;
const CLASSES: usize = 3;
const ROWS: usize = 5;

/// A small model in training, created again as a new process would.
struct Training {
    handles: [Parameter; 4],
    parameters: Parameters,
    gradients: Gradients,
    optimizer: Optimizer<AdamW>,
    arena: Arena,
}

impl Training {
    fn new(device: &Device, seed: u64) -> Self {
        let mut spec = ParameterSpec::builder();
        let zero = Initializer::Constant(0.0);
        let handles = [
            spec.add("first.weight", [FEATURES, HIDDEN], Initializer::fan_in(FEATURES)),
            spec.add("first.bias", [HIDDEN], zero),
            spec.add("second.weight", [HIDDEN, CLASSES], Initializer::fan_in(HIDDEN)),
            spec.add("second.bias", [CLASSES], zero),
        ];
        let parameters = Parameters::new(device, &spec.build().unwrap(), seed).unwrap();
        let gradients = Gradients::zeros(&parameters).unwrap();
        let config =
            AdamW { learning_rate: 0.01, clip: Some(0.5), schedule: Schedule::cosine(2, 6, 0.1), ..AdamW::default() };
        let optimizer = Optimizer::new(&parameters, config).unwrap();
        let arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        Self { handles, parameters, gradients, optimizer, arena }
    }

    /// Makes one update, with the batch of this number.
    fn update(&mut self, number: u64) {
        let mut random = Random::new(number);
        let (x, labels) = (random.normals(ROWS * FEATURES), random.belows(ROWS, CLASSES as u32));
        let Self { handles: [w1, b1, w2, b2], parameters, gradients, optimizer, arena } = self;
        arena
            .step(|step| {
                gradients.zero(step)?;
                let tape = Tape::new(step, parameters);
                let x = tape.input(step.upload(&x, [ROWS, FEATURES])?);
                let logits = tape.linear(&tape.linear_gelu(&x, *w1, Some(*b1))?, *w2, Some(*b2))?;
                let labels = step.upload_indices(&labels, [ROWS])?;
                let loss = tape.cross_entropy(&logits, labels)?;
                tape.backward(&loss, gradients)?;
                let ticket = optimizer.advance()?;
                optimizer.apply(ticket, step, parameters, gradients)?;
                Ok(())
            })
            .unwrap();
    }

    /// Returns the weights and both moments, as bits, and the number of updates.
    fn state(&self) -> ([Vec<u32>; 3], u64) {
        let [first, second] = self.optimizer.state()[..] else { panic!("the optimizer's state has two moments") };
        ([self.parameters.regions()[0], first, second].map(words), self.optimizer.updates())
    }

    fn save(&self, path: &Path) -> Result<()> {
        Checkpoint::save(path, &self.parameters, Some(&self.optimizer), &[("epoch", "3".into())])
    }

    fn restore(&mut self, path: &Path) -> Result<()> {
        Checkpoint::load(path)?.restore(&mut self.parameters, Some(&mut self.optimizer))
    }
}

fn emulated() -> Device {
    crate::support::open(DeviceKind::Emulated)
}

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    (folder, path)
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the reason of an [`Error::File`] about `path`.
#[track_caller]
fn file_error<T: std::fmt::Debug>(result: Result<T>, path: &Path) -> String {
    match result {
        Err(Error::File { path: named, reason }) if named == path => reason,
        other => panic!("expected an error about {}, got {other:?}", path.display()),
    }
}

/// A tensor in a file: name, type, shape.
type Described = (String, Dtype, Vec<usize>);

/// Returns the contents of a checkpoint of [`Training`].
fn described() -> Vec<Described> {
    let weights: [(&str, &[usize]); 4] = [
        ("first.weight", &[FEATURES, HIDDEN]),
        ("first.bias", &[HIDDEN]),
        ("second.weight", &[HIDDEN, CLASSES]),
        ("second.bias", &[CLASSES]),
    ];
    let of = |prefix| weights.map(|(name, shape)| (format!("{prefix}{name}"), Dtype::F32, shape.to_vec()));
    ["", "adamw.first.", "adamw.second."].into_iter().flat_map(of).collect()
}

/// Writes a safetensors file of these tensors and notes, with the digest that the format requires.
fn write_sealed(path: &Path, mut tensors: Vec<(String, TensorView<'_>)>, mut notes: HashMap<String, String>) {
    let mut sorted: Vec<_> = notes.iter().collect();
    sorted.sort();
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut hash = Sha256::new();
    for (key, value) in sorted {
        hash.update(format!("{}:{key}{}:{value}", key.len(), value.len()));
    }
    for (name, tensor) in &tensors {
        hash.update(format!("{}:{name}{:?}", name.len(), tensor.shape()));
        hash.update(tensor.data());
    }
    let digest = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    notes.insert("stepscope.sha256".into(), digest);
    fs::write(path, safetensors::serialize(tensors, Some(notes)).unwrap()).unwrap();
}

/// Writes a safetensors file of these tensors, all zero.
fn write_file(path: &Path, tensors: &[Described], notes: &[(&str, &str)]) {
    let zeros = vec![0u8; 1 << 16];
    let bytes = |dtype: &Dtype, shape: &[usize]| &zeros[..shape.iter().product::<usize>() * dtype.bitsize() / 8];
    let view = |(name, dtype, shape): &Described| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes(dtype, shape)).unwrap())
    };
    let notes = notes.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    write_sealed(path, tensors.iter().map(view).collect(), notes);
}

/// Converts a checkpoint to the old format without the optimizer's name, from the time when AdamW
/// was the only one.
fn make_old(path: &Path) {
    let file = fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
    let mut notes = header.metadata().clone().unwrap();
    assert_eq!(notes.remove("stepscope.optimizer").unwrap(), "adamw");
    notes.remove("stepscope.sha256");
    write_sealed(path, safetensors::SafeTensors::deserialize(&file).unwrap().tensors(), notes);
}

on_each_device! {
    fn resumed_run_matches_uninterrupted_run(device: &Device) {
        let (_folder, path) = folder();
        let mut straight = Training::new(device, 1);
        (1..=6).for_each(|number| straight.update(number));
        let mut interrupted = Training::new(device, 1);
        (1..=3).for_each(|number| interrupted.update(number));
        interrupted.save(&path).unwrap();
        let saved = interrupted.state();
        drop(interrupted);
        // Other weights, other moments, and a parameter spec of its own.
        let mut resumed = Training::new(device, 99);
        resumed.update(77);
        resumed.restore(&path).unwrap();
        assert_eq!(resumed.state(), saved);
        resumed.update(78);
        make_old(&path);
        resumed.restore(&path).unwrap();
        assert_eq!(resumed.state(), saved);
        (4..=6).for_each(|number| resumed.update(number));
        assert_eq!(resumed.state(), straight.state());
        assert_eq!(resumed.parameters.sha256().unwrap(), straight.parameters.sha256().unwrap());
        assert_ne!(straight.state().0[0], saved.0[0]);
    }

    fn every_bit_pattern_round_trips(device: &Device) {
        let (_folder, path) = folder();
        let odd_nan = f32::from_bits(0xffc1_2345);
        let values = [0.0, -0.0, f32::NAN, odd_nan, f32::INFINITY, -f32::INFINITY, 1e-45, f32::MIN_POSITIVE, f32::MAX];
        let mut spec = ParameterSpec::builder();
        let handle = spec.add("odd", [values.len()], Initializer::Constant(1.0));
        let spec = spec.build().unwrap();
        let mut parameters = Parameters::new(device, &spec, 0).unwrap();
        parameters.write(handle, &values).unwrap();
        let refused = |update, done: Result<()>| {
            let tensor = "`odd`".to_owned();
            assert_eq!(done, Err(Error::NotFinite { update, what: Quantity::Weight, tensor }));
        };
        let optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
        refused(None, Checkpoint::save(&path, &parameters, None, &[]));
        refused(Some(0), Checkpoint::save(&path, &parameters, Some(&optimizer), &[]));
        refused(None, stepscope::files::save_state_dict(&parameters, &path));
        assert!(!path.exists(), "a failed save must leave no file");
        Checkpoint::save_with(&path, &parameters, None, &[], NonFinite::Allow).unwrap();
        let mut restored = Parameters::new(device, &spec, 0).unwrap();
        let before = restored.sha256().unwrap();
        let checkpoint = Checkpoint::load(&path).unwrap();
        refused(None, checkpoint.restore(&mut restored, None));
        assert_eq!(restored.sha256().unwrap(), before, "a failed restore must change nothing");
        checkpoint.restore_with(&mut restored, None, Transfer::new().non_finite(NonFinite::Allow)).unwrap();
        assert_eq!(bits(&restored.read(handle).unwrap()), bits(&values));
        // The padding after a parameter is zero, whatever was restored.
        assert!(restored.read_flat().unwrap()[values.len()..].iter().all(|value| value.to_bits() == 0));
    }
}

#[test]
fn checkpoint_contains_tensors_and_notes() {
    let (_folder, path) = folder();
    let mut training = Training::new(&emulated(), 1);
    training.update(1);
    training.save(&path).unwrap();
    let checkpoint = Checkpoint::load(&path).unwrap();
    assert_eq!(checkpoint.note("epoch").unwrap(), "3");
    assert!(file_error(checkpoint.note("absent"), &path).contains("absent"));
    // Any reader of safetensors finds the weights by name.
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("first.weight").unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, [FEATURES, HIDDEN].as_slice()));
    let weights: Vec<f32> =
        tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(bits(&weights), bits(&training.parameters.read(training.handles[0]).unwrap()));
    let mut names: Vec<&str> = file.names().into_iter().collect();
    names.sort_unstable();
    let parts = ["first.bias", "first.weight", "second.bias", "second.weight"];
    let expected: Vec<String> = ["adamw.first.", "adamw.second.", ""]
        .iter()
        .flat_map(|prefix| parts.map(|part| format!("{prefix}{part}")))
        .collect();
    assert_eq!(names, expected);
}

#[test]
fn weights_save_without_an_optimizer() {
    let (_folder, path) = folder();
    let device = emulated();
    let mut training = Training::new(&device, 1);
    training.update(1);
    Checkpoint::save(&path, &training.parameters, None, &[]).unwrap();
    let mut other = Training::new(&device, 2);
    let before = other.state();
    assert!(file_error(other.restore(&path), &path).contains("stepscope.updates"));
    assert_eq!(other.state(), before, "a failed restore of the optimizer's state must change nothing");
    Checkpoint::load(&path).unwrap().restore(&mut other.parameters, None).unwrap();
    assert_eq!(other.state().0[0], training.state().0[0]);
    assert_eq!(other.state().0[1..], before.0[1..]);
}

#[test]
fn mismatched_checkpoint_changes_nothing() {
    let (_folder, path) = folder();
    let mut training = Training::new(&emulated(), 1);
    training.update(1);
    let before = training.state();
    let good = described();
    let notes = [("stepscope.format", "1"), ("stepscope.updates", "5")];
    for (at, (name, ..)) in good.iter().enumerate() {
        for damage in ["missing", "other shape", "other type"] {
            let mut tensors = good.clone();
            match damage {
                "missing" => drop(tensors.remove(at)),
                "other shape" => tensors[at].2.push(1),
                _ => tensors[at].1 = Dtype::F64,
            }
            write_file(&path, &tensors, &notes);
            let reason = file_error(training.restore(&path), &path);
            assert!(reason.contains(&format!("`{name}`")), "{damage} {name}: {reason}");
            assert_eq!(training.state(), before, "{damage} {name}");
        }
    }
    for updates in ["", "-1", "many"] {
        write_file(&path, &good, &[("stepscope.format", "1"), ("stepscope.updates", updates)]);
        assert!(file_error(training.restore(&path), &path).contains("stepscope.updates"));
        assert_eq!(training.state(), before);
    }
    for format in ["", "0", "2", "one"] {
        write_file(&path, &good, &[("stepscope.format", format), ("stepscope.updates", "5")]);
        assert!(file_error(Checkpoint::load(&path), &path).contains("stepscope.format"));
    }
    write_file(&path, &good, &[("stepscope.updates", "5")]);
    assert!(file_error(Checkpoint::load(&path), &path).contains("stepscope.format"));
    // As a control, the unchanged file is accepted.
    write_file(&path, &good, &notes);
    training.restore(&path).unwrap();
    assert_eq!(training.state().1, 5);
}

#[test]
fn foreign_optimizer_is_refused() {
    let (_folder, path) = folder();
    let device = emulated();
    let mut training = Training::new(&device, 1);
    training.update(1);
    training.save(&path).unwrap();
    // Smaller, larger, and by chance of the same size.
    for elements in [1, 1_000_000, training.parameters.spec().elements()] {
        let mut spec = ParameterSpec::builder();
        spec.add("other", [elements], Initializer::Constant(0.0));
        let others = Parameters::new(&device, &spec.build().unwrap(), 0).unwrap();
        let mut optimizer = Optimizer::new(&others, AdamW::default()).unwrap();
        let mut parameters = Training::new(&device, 2).parameters;
        let before = parameters.sha256().unwrap();
        let restored = Checkpoint::load(&path).unwrap().restore(&mut parameters, Some(&mut optimizer));
        assert!(matches!(restored, Err(Error::Misuse { .. })), "{elements}: {restored:?}");
        assert_eq!((optimizer.updates(), parameters.sha256().unwrap()), (0, before), "{elements}");
        let saved = Checkpoint::save(&path, &parameters, Some(&optimizer), &[]);
        assert!(matches!(saved, Err(Error::Misuse { .. })), "{elements}: {saved:?}");
    }
}

#[test]
fn damaged_files_are_refused() {
    let (_folder, path) = folder();
    let mut training = Training::new(&emulated(), 1);
    training.update(1);
    training.save(&path).unwrap();
    let (whole, before) = (fs::read(&path).unwrap(), training.state());
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let torn = (0..header + 64).chain((header + 64..whole.len()).step_by(97)).chain([whole.len() - 1]);
    for len in torn {
        fs::write(&path, &whole[..len]).unwrap();
        file_error(Checkpoint::load(&path), &path);
    }
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    file_error(Checkpoint::load(&path), &path);
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &huge).unwrap();
    file_error(Checkpoint::load(&path), &path);
    fs::remove_file(&path).unwrap();
    file_error(Checkpoint::load(&path), &path);
    // A flipped bit anywhere is refused without a panic, and changes nothing.
    let mut other = Training::new(&emulated(), 2);
    let untouched = other.state();
    for place in (0..header).chain((header..whole.len()).step_by(7)) {
        let mut damaged = whole.clone();
        damaged[place] ^= 1 << (place % 8);
        fs::write(&path, &damaged).unwrap();
        file_error(other.restore(&path), &path);
        assert_eq!(other.state(), untouched);
    }
    assert_eq!(training.state(), before);
}

#[test]
fn failed_save_keeps_old_file() {
    let (folder, path) = folder();
    let training = Training::new(&emulated(), 1);
    let missing = folder.path().join("absent").join("model.safetensors");
    file_error(training.save(&missing), &missing);
    assert_eq!(names_in(folder.path()), [""; 0]);
    training.save(&path).unwrap();
    let below_a_file = path.join("model.safetensors");
    file_error(training.save(&below_a_file), &below_a_file);
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    file_error(training.save(&taken), &taken);
    assert_eq!(names_in(folder.path()), ["model.safetensors", "taken"]);
    assert_eq!(names_in(&taken), [""; 0]);
    Checkpoint::load(&path).unwrap();
}

#[test]
fn save_replaces_the_old_file() {
    let (folder, path) = folder();
    let mut training = Training::new(&emulated(), 1);
    training.save(&path).unwrap();
    training.update(1);
    training.save(&path).unwrap();
    let mut restored = Training::new(&emulated(), 2);
    restored.restore(&path).unwrap();
    assert_eq!(restored.state(), training.state());
    assert_eq!(names_in(folder.path()), ["model.safetensors"]);
}

#[cfg(unix)]
#[test]
fn checkpoint_has_default_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, path) = folder();
    let training = Training::new(&emulated(), 1);
    let plain = folder.path().join("plain");
    fs::write(&plain, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for _ in 0..2 {
        training.save(&path).unwrap();
        assert_eq!(format!("{:o}", mode(&path)), format!("{:o}", mode(&plain)));
    }
}

/// The environment variable with the path to which the next test's child process saves.
const CHILD: &str = "STEPSCOPE_TEST_CHECKPOINT_PATH";

/// Returns a model of a few hundred kilobytes, too large for the child's limit.
fn large(seed: u64) -> Parameters {
    let mut spec = ParameterSpec::builder();
    spec.add("weight", [300, 300], Initializer::fan_in(300));
    Parameters::new(&emulated(), &spec.build().unwrap(), seed).unwrap()
}

/// A process that may write only a few kilobytes to a file saves over a checkpoint. Once it gets an
/// error, and once it is killed in the middle.
#[cfg(unix)]
#[test]
fn interrupted_save_keeps_old_file() {
    use std::os::unix::process::ExitStatusExt;
    const NAME: &str = "checkpoint::interrupted_save_keeps_old_file";
    if let Some(path) = std::env::var_os(CHILD) {
        let path = Path::new(&path);
        file_error(Checkpoint::save(path, &large(2), None, &[]), path);
        return;
    }
    let (folder, path) = folder();
    Checkpoint::save(&path, &large(1), None, &[]).unwrap();
    let old = fs::read(&path).unwrap();
    assert!(old.len() > 300_000);
    let child = |prelude: &str| -> ExitStatus {
        Command::new("sh")
            .args(["-c", &format!("{prelude} ulimit -f 8; exec \"$0\" \"$@\"")])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--quiet"])
            .current_dir(folder.path())
            // A name without a folder, too.
            .env(CHILD, "model.safetensors")
            .output()
            .unwrap()
            .status
    };
    let exit = child("trap '' XFSZ;");
    assert!(exit.success(), "{exit}");
    assert_eq!(fs::read(&path).unwrap(), old);
    assert_eq!(names_in(folder.path()), ["model.safetensors"]);
    let killed = child("");
    assert!(killed.signal().is_some(), "{killed}");
    assert_eq!(fs::read(&path).unwrap(), old);
}

#[test]
fn wrong_file_kind_names_its_reader() {
    let folder = tempfile::tempdir().unwrap();
    let [checkpoint, weights] = ["checkpoint", "weights"].map(|name| folder.path().join(name));
    let mut training = Training::new(&Device::open(DeviceKind::Emulated).unwrap(), 3);
    Checkpoint::save(&checkpoint, &training.parameters, None, &[]).unwrap();
    stepscope::files::save_state_dict(&training.parameters, &weights).unwrap();
    let reason = file_error(Checkpoint::load(&weights), &weights);
    assert!(reason.contains("`Parameters::load_state_dict`"), "{reason}");
    let reason = file_error(stepscope::files::load_state_dict(&mut training.parameters, &checkpoint), &checkpoint);
    assert!(reason.contains("`Checkpoint::load`"), "{reason}");
    // Each note states the matrix layout.
    for (path, lies) in [(&checkpoint, "inputs x outputs"), (&weights, "outputs x inputs")] {
        let bytes = fs::read(path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let notes = header.metadata().as_ref().unwrap();
        assert_eq!(notes.get("stepscope.linear_weights").map(String::as_str), Some(lies));
    }
}
