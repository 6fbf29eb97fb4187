//! The reader of safetensors files under attack. Whatever a file holds and whatever happens to it
//! meanwhile, it is loaded right or refused soon by a short error. Nothing is changed then, unless
//! a checkpoint is written to while it is restored.

#![forbid(unsafe_code)]

use crate::support::forged::forge;
use std::fs::{self, File};
use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::parameters::Initializer;
use stepscope::{AdamW, Checkpoint, Device, DeviceKind, Error, Optimizer, ParameterSpec, Parameters};

/// Far more than a refusal takes on a busy machine.
const SOON: Duration = Duration::from_secs(10);
/// The longest message.
const SHORT: usize = 1000;

/// Returns a model with one parameter of this many elements.
fn model(device: &Device, elements: usize, seed: u64) -> (Parameters, Optimizer<AdamW>) {
    let mut spec = ParameterSpec::builder();
    spec.add("w", [elements], Initializer::fan_in(1));
    let parameters = Parameters::new(device, &spec.build().unwrap(), seed).unwrap();
    let optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
    (parameters, optimizer)
}

/// Returns a file of this header and these bytes.
fn file(header: &str, bytes: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()
}

/// Returns the reason why a file is refused, by each reader, soon and in few words. The weights
/// must not change.
#[track_caller]
fn refused(path: &Path) -> String {
    let (mut parameters, _) = model(&crate::support::open(DeviceKind::Emulated), 1, 1);
    let (before, start) = (parameters.sha256().unwrap(), Instant::now());
    let errors = [
        Checkpoint::load(path).map(drop).unwrap_err(),
        stepscope::files::load_state_dict(&mut parameters, path).unwrap_err(),
    ];
    let [first, second] = errors.map(|error| match error {
        Error::File { path: named, reason } if named == path => reason,
        other => panic!("expected an error about the file, got {other}"),
    });
    // The host's available memory changes between two reads.
    let words = |text: &str| text.replace(|letter: char| letter.is_ascii_digit(), "");
    assert_eq!(words(&first), words(&second));
    assert!(first.len() < SHORT, "{} bytes: {first}", first.len());
    assert!(start.elapsed() < SOON, "{:?}: {first}", start.elapsed());
    assert_eq!(parameters.sha256().unwrap(), before);
    first
}

#[test]
fn false_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let tensor = |dtype: &str, shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let w = tensor("F32", "[1]", 0, 4);
    let long = "x".repeat(1 << 20);
    let deep = format!("{}{}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    for (header, bytes, words) in [
        (String::new(), 0, "its header"),
        ("[]".into(), 0, "its header"),
        ("{".into(), 0, "its header"),
        (r#"{"w":1}"#.into(), 0, "its header"),
        (format!(r#"{{"w":{w},"w":{w}}}"#), 4, "two named `w`"),
        (format!(r#"{{"w":{w},"w":{}}}"#, tensor("F32", "[1]", 4, 8)), 8, "two named `w`"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "two named `__metadata__`"),
        (r#"{"__metadata__":{"a":"1","a":"2"}}"#.into(), 0, "two texts named `a`"),
        (r#"{"__metadata__":{"a":1}}"#.into(), 0, "its header"),
        (format!(r#"{{"__metadata__":{w}}}"#), 4, "its header"),
        // Overlapping, with a gap, past the end, short of it, backwards, in conflict with the type
        // and the shape.
        (format!(r#"{{"v":{w},"w":{}}}"#, tensor("F32", "[1]", 2, 6)), 6, "`w`: expected bytes 4 to 8, got 2 to 6"),
        (format!(r#"{{"v":{w},"w":{w}}}"#), 4, "expected bytes 4 to 8, got 0 to 4"),
        (format!(r#"{{"w":{}}}"#, tensor("F32", "[1]", 4, 8)), 8, "`w`: expected bytes 0 to 4, got 4 to 8"),
        (format!(r#"{{"w":{w}}}"#), 3, "expected 4 bytes after the header, as it states, got 3"),
        (format!(r#"{{"w":{w}}}"#), 5, "expected 4 bytes after the header, as it states, got 5"),
        (format!(r#"{{"w":{}}}"#, tensor("F32", "[1]", 4, 0)), 4, "`w`: expected bytes 0 to 4, got 4 to 0"),
        (format!(r#"{{"w":{}}}"#, tensor("F64", "[1]", 0, 4)), 4, "`w`: expected bytes 0 to 8, got 0 to 4"),
        (format!(r#"{{"w":{}}}"#, tensor("F4", "[1]", 0, 1)), 1, "expected a size in whole bytes"),
        (format!(r#"{{"w":{}}}"#, tensor("F99", "[1]", 0, 4)), 4, "its header"),
        // Numbers that overflow: in the shape, in the sum, beyond 64 bits, below zero.
        (format!(r#"{{"w":{}}}"#, tensor("F32", "[4611686018427387905]", 0, 4)), 4, "that does not overflow"),
        (format!(r#"{{"w":{}}}"#, tensor("U8", "[4294967296,4294967296]", 0, 0)), 0, "that does not overflow"),
        (
            format!(r#"{{"v":{w},"w":{}}}"#, tensor("U8", "[2305843009213693951]", 4, 2305843009213693955)),
            4,
            "bytes after the header",
        ),
        (format!(r#"{{"w":{}}}"#, tensor("U8", "[18446744073709551616]", 0, 4)), 4, "its header"),
        (format!(r#"{{"w":{}}}"#, tensor("U8", "[-1]", 0, 4)), 4, "its header"),
        (format!(r#"{{"w":{}}}"#, tensor("F32", "[1e0]", 0, 4)), 4, "its header"),
        // Long and deep.
        (format!(r#"{{"w":{deep}}}"#), 0, "its header"),
        (format!(r#"{{"w":{{"x":{deep}}}}}"#), 0, "its header"),
        (format!(r#"{{"w":{}}}"#, tensor(&long, "[1]", 0, 4)), 4, "its header"),
        (format!(r#"{{"{long}":{w},"{long}":{w}}}"#), 4, "two named `xxxx"),
        (format!(r#"{{"{long}":{w}}}"#), 5, "expected 4 bytes"),
        (format!(r#"{{"{long}":{}}}"#, tensor("F32", "[1]", 4, 8)), 8, "got 4 to 8"),
        (format!(r#"{{"w":{}}}"#, tensor("F32", &format!("[{}0]", "1,".repeat(1 << 20)), 0, 4)), 4, "got 0 to 4"),
    ] {
        fs::write(&path, file(&header, &vec![0; bytes])).unwrap();
        let reason = refused(&path);
        let start: String = header.chars().take(200).collect();
        assert!(reason.contains(words), "{start}: {reason}");
    }
}

#[test]
fn false_lengths_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for bytes in [0, 1, 7] {
        fs::write(&path, vec![0; bytes]).unwrap();
        assert!(refused(&path).contains("truncated"));
    }
    for length in [1, 3, 100_000_001, 5 << 30, u64::MAX - 8, u64::MAX] {
        fs::write(&path, [&length.to_le_bytes()[..], b"{"].concat()).unwrap();
        let reason = refused(&path);
        assert!(length == 1 || reason.contains("header of at most"), "{length}: {reason}");
    }
    // As long as the file, and more than the format allows.
    let sparse = File::create(&path).unwrap();
    sparse.set_len(8 << 30).unwrap();
    sparse.write_all_at(&(5u64 << 30).to_le_bytes(), 0).unwrap();
    assert!(refused(&path).contains("header of at most 100000000 bytes"));
}

/// The starts of `torch.save`'s files, in its current format and in that before 1.6.
#[test]
fn torch_save_files_are_recognized() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    for (start, kind) in [
        (&b"PK\x03\x04\0\0\x08\x08"[..], "a zip archive"),
        (&b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."[..], "a pickle"),
    ] {
        fs::write(&path, [start, &[0; 100]].concat()).unwrap();
        let reason = refused(&path);
        assert!(reason.contains(&format!("{kind}, as `torch.save` writes it")), "{reason}");
        assert!(reason.contains("safetensors.torch.save_file") && reason.contains("load_state_dict"), "{reason}");
    }
}

/// A sparse file of a tebibyte, which takes no disk space and would take all of the host's memory.
#[test]
fn oversized_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes = 1u64 << 40;
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let start = file(&header, &[]);
    let mut sparse = File::create(&path).unwrap();
    sparse.write_all(&start).unwrap();
    sparse.set_len(start.len() as u64 + bytes).unwrap();
    let (mut parameters, _) = model(&crate::support::open(DeviceKind::Emulated), 1, 1);
    let reason = stepscope::files::load_state_dict(&mut parameters, &path).unwrap_err().to_string();
    assert!(
        reason.contains("that the host, or this process's cgroup, has available")
            && reason.contains(&bytes.to_string()),
        "{reason}"
    );
    // A checkpoint is not read into memory, and its notes come first.
    let reason = Checkpoint::load(&path).unwrap_err().to_string();
    assert!(reason.contains("without `stepscope.format`"), "{reason}");
    // Only zeros.
    sparse.rewind().unwrap();
    sparse.write_all(&vec![0; start.len()]).unwrap();
    assert!(refused(&path).contains("its header"));
}

#[test]
fn only_plain_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [folder.path(), &pipe, Path::new("/dev/zero")] {
        assert!(refused(path).contains("expected a plain file"));
    }
    refused(&folder.path().join("absent"));
}

/// A file that is written to after it was loaded is refused. One that is removed is still read.
#[test]
fn changes_after_loading_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let device = crate::support::open(DeviceKind::Emulated);
    let (saved, optimizer) = model(&device, 5000, 1);
    Checkpoint::save(&path, &saved, Some(&optimizer), &[]).unwrap();
    let length = fs::metadata(&path).unwrap().len();
    for disturb in ["cut", "written", "a bit", "removed"] {
        let checkpoint = Checkpoint::load(&path).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        match disturb {
            "cut" => file.set_len(0).unwrap(),
            "written" => file.write_all_at(&vec![7; length as usize], 0).unwrap(),
            "a bit" => {
                let mut last = [0];
                file.read_exact_at(&mut last, length - 1).unwrap();
                file.write_all_at(&[last[0] ^ 1], length - 1).unwrap();
            }
            _ => fs::remove_file(&path).unwrap(),
        }
        let (mut parameters, mut others) = model(&device, 5000, 2);
        match checkpoint.restore(&mut parameters, Some(&mut others)) {
            Ok(()) => {
                assert_eq!(disturb, "removed");
                assert_eq!(parameters.sha256().unwrap(), saved.sha256().unwrap());
            }
            Err(Error::File { reason, .. }) => {
                assert!(disturb != "removed" && !reason.is_empty(), "{disturb}: {reason}");
            }
            Err(other) => panic!("{disturb}: expected an error about the file, got {other}"),
        }
        Checkpoint::save(&path, &saved, Some(&optimizer), &[]).unwrap();
    }
}

/// Meanwhile, another thread cuts the file, rewrites it, writes other numbers or replaces it.
#[test]
fn changing_files_load_right_or_fail() {
    const ELEMENTS: usize = 400_000;
    let folder = tempfile::tempdir().unwrap();
    let [path, state_dict] = ["file", "state_dict"].map(|name| folder.path().join(name));
    let device = crate::support::open(DeviceKind::Emulated);
    let (saved, optimizer) = model(&device, ELEMENTS, 1);
    let expected = saved.sha256().unwrap();
    Checkpoint::save(&path, &saved, Some(&optimizer), &[]).unwrap();
    stepscope::files::save_state_dict(&saved, &state_dict).unwrap();
    let bytes = [&path, &state_dict].map(|path| fs::read(path).unwrap());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0u64.. {
                for (path, bytes) in [&path, &state_dict].into_iter().zip(&bytes) {
                    let file = File::options().write(true).create(true).truncate(false).open(path).unwrap();
                    let middle = bytes.len() as u64 / 2;
                    match round % 4 {
                        0 => file.set_len(middle).unwrap(),
                        1 => file.write_all_at(&[1, 2, 3, 4], middle).unwrap(),
                        2 => file.set_len(2 * middle).unwrap(),
                        _ => stepscope::files::replace_file(path, bytes).unwrap(),
                    }
                    // For a while it is as before.
                    file.write_all_at(bytes, 0).unwrap();
                    file.set_len(bytes.len() as u64).unwrap();
                    thread::sleep(Duration::from_millis(round % 3));
                }
                if done.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        let (mut parameters, mut optimizer) = model(&device, ELEMENTS, 2);
        let before = parameters.sha256().unwrap();
        let (mut loaded, mut failed) = (0, 0);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(3) || loaded == 0 || failed == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "{loaded} loaded, {failed} refused");
            match Checkpoint::load(&path).and_then(|file| file.restore(&mut parameters, Some(&mut optimizer))) {
                Ok(()) => {
                    loaded += 1;
                    assert_eq!(parameters.sha256().unwrap(), expected);
                    (parameters, optimizer) = model(&device, ELEMENTS, 2);
                }
                Err(Error::File { .. }) => {
                    failed += 1;
                    // The file may have changed while it was restored.
                    (parameters, optimizer) = model(&device, ELEMENTS, 2);
                }
                Err(other) => panic!("expected an error about the file, got {other}"),
            }
            // These numbers have no digest, so they may be wrong. But they come from one reading.
            match stepscope::files::load_state_dict(&mut parameters, &state_dict) {
                Ok(()) => (parameters, optimizer) = model(&device, ELEMENTS, 2),
                Err(Error::File { .. }) => assert_eq!(parameters.sha256().unwrap(), before),
                Err(other) => panic!("expected an error about the file, got {other}"),
            }
        }
        done.store(true, Ordering::SeqCst);
    });
}

/// Numbers of updates from which counting would overflow.
#[test]
fn unreachable_update_counts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let device = crate::support::open(DeviceKind::Emulated);
    let (mut parameters, mut optimizer) = model(&device, 4, 1);
    Checkpoint::save(&path, &parameters, Some(&optimizer), &[]).unwrap();
    let long = "9".repeat(1 << 20);
    for updates in [&u64::MAX.to_string(), &(u64::MAX / 2 + 1).to_string(), "-1", "1.0", "", &long] {
        forge(&path, &[("stepscope.updates", updates)]);
        let restored = Checkpoint::load(&path).unwrap().restore(&mut parameters, Some(&mut optimizer));
        let Err(Error::File { reason, .. }) = restored else { panic!("{restored:?}") };
        assert!(reason.contains("stepscope.updates") && reason.len() < SHORT, "{reason}");
        assert_eq!(optimizer.updates(), 0);
    }
    forge(&path, &[("stepscope.updates", &(u64::MAX / 2).to_string())]);
    Checkpoint::load(&path).unwrap().restore(&mut parameters, Some(&mut optimizer)).unwrap();
    assert_eq!(optimizer.advance().unwrap().number(), Some(u64::MAX / 2 + 1));
}

#[test]
fn colliding_names_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let device = crate::support::open(DeviceKind::Emulated);
    let mut spec = ParameterSpec::builder();
    spec.add("w", [1], Initializer::ONE);
    spec.at("adamw").at("first").add("w", [1], Initializer::ONE);
    let parameters = Parameters::new(&device, &spec.build().unwrap(), 1).unwrap();
    let optimizer = Optimizer::new(&parameters, AdamW::default()).unwrap();
    let error = Checkpoint::save(&path, &parameters, Some(&optimizer), &[]).unwrap_err();
    assert!(matches!(&error, Error::Misuse { got, .. } if got == "two named `adamw.first.w`"), "{error}");
    assert!(!path.exists());
    // Without moments the name is unique.
    Checkpoint::save(&path, &parameters, None, &[]).unwrap();
}
