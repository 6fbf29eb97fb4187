//! `StateDict`: folders in the format of Hugging Face, in one file and in shards. Inconsistent
//! shards are refused by name.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;
use stepscope::Error;
use stepscope::error::Quantity;
use stepscope::files::StateDict;

const INDEX: &str = "model.safetensors.index.json";
const SECOND: &str = "model-00002-of-00003.safetensors";

/// Returns three tensors of 40, 24 and 4 bytes, all of one number.
fn state(number: f32) -> StateDict {
    let mut tensors = StateDict::default();
    for (name, shape) in [("a.weight", &[5, 2][..]), ("b.weight", &[6]), ("c", &[])] {
        tensors.insert(name, shape, vec![number; shape.iter().product()]).unwrap();
    }
    tensors
}

fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn read(folder: &Path) -> Result<StateDict, Error> {
    StateDict::from_pretrained(folder, |_| false)
}

#[track_caller]
fn refused(folder: &Path, file: &str, words: &str) {
    match read(folder) {
        Err(Error::File { path, reason }) => {
            assert_eq!(path, folder.join(file));
            assert!(reason.contains(words) && reason.len() < 500, "expected `{words}` in: {reason}");
        }
        other => panic!("expected `{words}`, got {other:?}"),
    }
}

/// Applies `change` to the index.
fn change_index(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join(INDEX);
    let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(path, index.to_string()).unwrap();
}

#[test]
fn shards_round_trip_in_transformers_format() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let tensors = state(0.1);
    tensors.save_pretrained(folder, Some(28)).unwrap();
    let expected = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX];
    assert_eq!(
        names(folder),
        expected.map(String::from).into(),
        "a shard of at most 28 bytes holds 24 and 4, and 40 get their own"
    );
    let index: Value = serde_json::from_slice(&fs::read(folder.join(INDEX)).unwrap()).unwrap();
    let map = json!({ "a.weight": expected[0], "b.weight": expected[1], "c": expected[1] });
    assert_eq!(index, json!({ "metadata": { "total_size": 68 }, "weight_map": map }));
    let second = fs::read(folder.join(expected[1])).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&second).unwrap();
    assert_eq!(header.metadata().clone().unwrap()["format"], "pt", "transformers ask for it");
    let second = safetensors::SafeTensors::deserialize(&second).unwrap();
    assert_eq!(second.tensor("b.weight").unwrap().data(), [0.1_f32.to_le_bytes(); 6].as_flattened());
    assert_eq!(second.tensor("c").unwrap().shape(), [0; 0]);
    assert_eq!(read(folder).unwrap(), tensors);
    let rest = StateDict::from_pretrained(folder, |name| name.ends_with(".weight")).unwrap();
    assert_eq!(rest.iter().map(|(name, ..)| name).collect::<Vec<_>>(), ["c"]);
}

#[test]
fn saves_remove_old_shards() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for other in ["config.json", "model-00001-of-00009.bin", "adapter-00001-of-00009.safetensors"] {
        fs::write(folder.join(other), "").unwrap();
    }
    let others = names(folder);
    // The bytes of a shard, and the number of shards.
    let saves = [(1, 3), (1, 3), (40, 2), (28, 2), (1, 3), (68, 1), (68, 1), (40, 2), (67, 2), (u64::MAX, 1)];
    for (number, (most, shards)) in saves.into_iter().enumerate() {
        let tensors = state(number as f32);
        tensors.save_pretrained(folder, Some(most)).unwrap();
        assert_eq!(read(folder).unwrap(), tensors, "save {number}");
        let ours = names(folder).difference(&others).cloned().collect::<BTreeSet<_>>();
        let expected = match shards {
            1 => [String::from("model.safetensors")].into(),
            _ => (1..=shards)
                .map(|at| format!("model-{at:05}-of-{shards:05}.safetensors"))
                .chain([INDEX.into()])
                .collect(),
        };
        assert_eq!(ours, expected, "save {number}");
    }
}

/// Tensors that cannot be written are found before anything is changed.
#[test]
fn failed_save_keeps_old_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let old = state(1.0);
    for most in [None, Some(40)] {
        old.save_pretrained(folder, most).unwrap();
        fs::create_dir(folder.join(SECOND)).unwrap();
        let before = names(folder);
        let error = state(2.0).save_pretrained(folder, Some(1)).unwrap_err().to_string();
        assert!(error.contains(SECOND) && error.contains("a folder"), "{error}");
        assert_eq!((names(folder), read(folder).unwrap()), (before, old.clone()));
        fs::remove_dir(folder.join(SECOND)).unwrap();
        let mut infinite = state(2.0);
        infinite.insert("d", [2], vec![0.0, f32::INFINITY]).unwrap();
        let expected = Error::NotFinite { update: None, what: Quantity::Weight, tensor: "`d`".into() };
        assert_eq!(infinite.save_pretrained(folder, Some(1)).unwrap_err(), expected);
        assert_eq!(infinite.save(folder.join("model.safetensors")).unwrap_err(), expected);
        assert_eq!(read(folder).unwrap(), old);
    }
    let error = old.save_pretrained(folder.join("none"), Some(1)).unwrap_err().to_string();
    assert!(error.contains("none"), "{error}");
}

/// The environment variable with the folder to which the next test's child process saves.
const CHILD: &str = "STEPSCOPE_TEST_PRETRAINED_FOLDER";
/// A file that exists after the first save.
const BEGUN: &str = "begun";

/// Kills a process that saves repeatedly. The folder then has the tensors of one save, or reading
/// it reports that it has none.
#[cfg(unix)]
#[test]
fn killed_save_mixes_nothing() {
    const NAME: &str = "state_dict::pretrained::killed_save_mixes_nothing";
    if let Some(folder) = std::env::var_os(CHILD) {
        for number in 0_u16.. {
            // Equally often over shards of the same names and of others, with one file in between.
            let most = [1, 1, 40, 68][usize::from(number % 4)];
            state(number.into()).save_pretrained(&folder, Some(most)).unwrap();
            fs::write(Path::new(&folder).join(BEGUN), "").unwrap();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut whole = 0;
    for milliseconds in 1..=30 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--quiet"])
            .env(CHILD, folder)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while !folder.join(BEGUN).exists() {
            assert!(child.try_wait().unwrap().is_none(), "the child ended too early");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_file(folder.join(BEGUN)).unwrap();
        match read(folder) {
            Ok(tensors) => {
                let number = tensors.iter().next().unwrap().2[0];
                assert_eq!(tensors, state(number), "all shards must be from one save");
                whole += 1;
            }
            Err(error) => assert!(error.to_string().contains("has neither model.safetensors nor"), "{error}"),
        }
    }
    assert!(whole > 0);
}

#[test]
fn mismatched_shards_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let fresh = || state(1.0).save_pretrained(folder, Some(1)).unwrap();
    fresh();
    fs::remove_file(folder.join(SECOND)).unwrap();
    refused(folder, SECOND, "is missing, but model.safetensors.index.json lists tensors in it: 1");
    fresh();
    let whole = fs::read(folder.join(SECOND)).unwrap();
    for length in [whole.len() - 1, whole.len() - 24, 9, 0] {
        fs::write(folder.join(SECOND), &whole[..length]).unwrap();
        refused(folder, SECOND, "");
    }
    fresh();
    change_index(folder, |index| index["weight_map"]["d"] = SECOND.into());
    refused(folder, SECOND, "has no `d`, which model.safetensors.index.json lists there");
    fresh();
    change_index(folder, |index| drop(index["weight_map"].as_object_mut().unwrap().remove("b.weight")));
    // No entry of the index leads to this shard.
    assert_eq!(read(folder).unwrap().iter().map(|(name, ..)| name).collect::<Vec<_>>(), ["a.weight", "c"]);
    fresh();
    change_index(folder, |index| index["weight_map"]["b.weight"] = "model-00001-of-00003.safetensors".into());
    refused(folder, "model-00001-of-00003.safetensors", "has no `b.weight`, which");
    // In two shards, of which the index can name only one.
    fresh();
    state(1.0).save(folder.join(SECOND)).unwrap();
    refused(folder, SECOND, "has `a.weight`, which model.safetensors.index.json does not list there");
    fresh();
    let text = fs::read_to_string(folder.join(INDEX)).unwrap();
    let twice = text.replace("\"c\":", &format!("\"a.weight\": \"{SECOND}\", \"c\":"));
    fs::write(folder.join(INDEX), twice).unwrap();
    refused(folder, INDEX, "two texts named `a.weight`");
    for shard in ["", "../x.safetensors", "/x", "a\\b", &"x/".repeat(10_000)] {
        change_index_of(folder, shard);
        refused(folder, INDEX, "expected the name of a file in the same folder, got `");
    }
    for (text, words) in [
        ("", "EOF"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":[]}"#, "an object of texts"),
        (r#"{"weight_map":{"a":1}}"#, "expected a string"),
        (r#"{"weight_map":{}}"#, "expected tensors, got none"),
        (r#"{"weight_map":{},"weight_map":{}}"#, "duplicate field"),
    ] {
        fs::write(folder.join(INDEX), text).unwrap();
        refused(folder, INDEX, words);
    }
    fs::remove_file(folder.join(INDEX)).unwrap();
    refused(folder, "", "has neither model.safetensors nor model.safetensors.index.json");
}

fn change_index_of(folder: &Path, shard: &str) {
    let index = json!({ "weight_map": { "a.weight": shard } });
    fs::write(folder.join(INDEX), index.to_string()).unwrap();
}

#[test]
fn other_types_must_be_skipped() {
    use safetensors::{Dtype, tensor::TensorView};
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let path = folder.join("model.safetensors");
    let write = |dtype, bytes: &[u8]| {
        let view = TensorView::new(dtype, vec![2], bytes).unwrap();
        fs::write(&path, safetensors::serialize([("mask", view)], None).unwrap()).unwrap();
    };
    write(Dtype::BOOL, &[1, 0]);
    refused(folder, "model.safetensors", "`mask`: expected F32, BF16 or F16, got BOOL");
    assert_eq!(StateDict::from_pretrained(folder, |name| name == "mask").unwrap(), StateDict::default());
    write(Dtype::F32, [1.0, f32::NAN].map(f32::to_le_bytes).as_flattened());
    refused(folder, "model.safetensors", "`mask`: expected finite numbers, got NaN at index 1");
    assert_eq!(StateDict::from_pretrained(folder, |name| name == "mask").unwrap(), StateDict::default());
}

#[test]
fn value_count_must_match_shape() {
    let mut tensors = state(1.0);
    for (name, shape, count) in [("d", &[2, 3][..], 5), ("d", &[usize::MAX, 2], 0), ("d", &[], 0)] {
        let error = tensors.insert(name, shape, vec![0.0; count]).unwrap_err().to_string();
        assert!(error.contains("as many values for `d`") && error.ends_with(&format!("got {count}")), "{error}");
    }
    let error = tensors.insert("c", [1], vec![0.0]).unwrap_err().to_string();
    assert!(error.contains("two named `c`"), "{error}");
    assert_eq!(tensors.remove("b.weight"), Some((vec![6], vec![1.0; 6])));
    assert_eq!((tensors.remove("b.weight"), tensors.iter().count()), (None, 2));
}
