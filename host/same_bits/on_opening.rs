//! Opening a device, and testing kernels that nobody knows on the way.
//!
//! Invariant: no device is handed out whose kernels were tested and are not right.

#![forbid(unsafe_code)]

use super::Tested;
use super::remembered::{Key, Remembered};
use crate::driver::{Device, DeviceBuilder, SelfTest};
use crate::error::{Error, Result};

impl DeviceBuilder {
    /// Opens the device. A GPU whose kernels are new there is tested first; see [`SelfTest`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] when it is not there or this build cannot drive it, with what to do; [`Error::Kernels`] when one of its kernels
    /// is not right, also where [`DeviceKind::Auto`](crate::DeviceKind::Auto) has chosen it; [`Error::Timeout`] when the driver does not
    /// answer; [`Error::Misuse`] for a malformed `STEPSCOPE_CHECKED` or `STEPSCOPE_SELF_TEST`, and for kernels of two packages of one
    /// name, or of one that is named like stepscope's own.
    pub fn open(self) -> Result<Device> {
        let (when, planted) = (self.tests()?, self.has_faults());
        let device = self.open_untested()?;
        // What a device with planted faults does says nothing about others.
        let key = if planted { None } else { Key::of(device.description()) };
        guard(when, key.as_ref(), Remembered::of_user, || device.self_test())?;
        Ok(device)
    }
}

/// Tests kernels where they must be tested. The `key` names those that can be remembered, in a place that is only asked for then.
fn guard(
    when: SelfTest,
    key: Option<&Key>,
    place: impl FnOnce() -> Option<Remembered>,
    test: impl FnOnce() -> Result<Tested>,
) -> Result<()> {
    if when == SelfTest::Never || (when == SelfTest::WhenNew && key.is_none()) {
        return Ok(());
    }
    let known = key.and_then(|key| Some((key, place()?)));
    if when == SelfTest::WhenNew && known.as_ref().is_some_and(|(key, remembered)| remembered.find(key).is_some()) {
        return Ok(());
    }
    let found = test();
    match (&found, &known) {
        (Ok(tested), Some((key, remembered))) => remembered.remember(key, *tested),
        (Err(Error::Kernels { .. }), Some((key, remembered))) => remembered.forget(key),
        _ => {}
    }
    let Tested { kernels, elapsed } = found?;
    tracing::info!(kernels, seconds = elapsed.as_secs_f64(), "kernels tested");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceKind;
    use crate::driver::Description;
    use crate::ptx::{PtxBuild, PtxCompiler};
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    const TESTED: Tested = Tested { kernels: 49, elapsed: Duration::from_millis(50) };

    fn ptx(sha256: &str) -> Option<PtxBuild> {
        Some(PtxBuild { arch: 121, sha256: sha256.into(), compiler: PtxCompiler::RustCuda })
    }

    /// What a GPU would be.
    fn described() -> Description {
        let description = Device::open(DeviceKind::Emulated).unwrap().description().clone();
        let driver = Some("CUDA 13.0, driver 580.1".into());
        Description { name: "NVIDIA Made Up".into(), capability: Some(121), driver, ptx: ptx("00ff"), ..description }
    }

    fn key() -> Key {
        Key::of(&described()).expect("a device with PTX")
    }

    /// Whether kernels are tested, which are right.
    fn is_tested(when: SelfTest, key: Option<&Key>, folder: &Path) -> bool {
        let mut tested = false;
        let test = || {
            tested = true;
            Ok(TESTED)
        };
        guard(when, key, || Some(Remembered::at(folder.into())), test).unwrap();
        tested
    }

    fn is_new(key: &Key, folder: &Path) -> bool {
        is_tested(SelfTest::WhenNew, Some(key), folder)
    }

    #[test]
    fn new_kernels_are_tested_once() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path().join("not/yet there"), key());
        assert!(!is_tested(SelfTest::Never, Some(&key), &folder));
        assert!(!folder.exists());
        assert!(is_new(&key, &folder));
        assert!(!is_new(&key, &folder));
        assert!(is_tested(SelfTest::Always, Some(&key), &folder));
        let path = Remembered::at(folder.clone()).find(&key).expect("it is remembered");
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with(
                "ptx sm_121 00ff by rust-cuda\ngpu NVIDIA Made Up, sm_121\ndriver CUDA 13.0, driver 580.1\ncases "
            ),
            "{text}"
        );
        assert!(text.contains(": 49 kernels give the right bits, tested in 0.050 s"), "{text}");
        // Another one of each, tested once too.
        let others = [
            Description { ptx: ptx("other"), ..described() },
            Description { driver: Some("other".into()), ..described() },
            Description { name: "NVIDIA Other".into(), ..described() },
            Description { capability: Some(90), ..described() },
        ];
        for (number, other) in others.iter().map(|other| Key::of(other).unwrap()).enumerate() {
            assert!(is_new(&other, &folder), "{number}");
            assert!(!is_new(&other, &folder), "{number}");
            assert_eq!(fs::read_dir(&folder).unwrap().count(), number + 2);
        }
        assert!(!is_new(&key, &folder));
    }

    #[test]
    fn a_device_without_ptx_is_tested_on_demand_and_nothing_is_remembered() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        assert_eq!(Key::of(device.description()), None);
        let folder = tempfile::tempdir().unwrap();
        for (when, tested) in [(SelfTest::WhenNew, false), (SelfTest::Always, true), (SelfTest::Never, false)] {
            assert_eq!(is_tested(when, None, folder.path()), tested);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn kernels_that_are_wrong_are_not_remembered_and_what_was_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path(), key());
        let wrong = Error::Kernels { kernel: "fill", reason: "is wrong".into(), device: "gpu".into(), ptx: None };
        let fails = |when, error: &Error| {
            let outcome = guard(when, Some(&key), || Some(Remembered::at(folder.into())), || Err(error.clone()));
            assert_eq!(outcome.as_ref(), Err(error));
        };
        fails(SelfTest::WhenNew, &wrong);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
        assert!(is_new(&key, folder));
        fails(SelfTest::Always, &wrong);
        assert!(is_new(&key, folder));
        // No memory says nothing about kernels.
        fails(SelfTest::Always, &Error::Timeout { call: "allocate", waited: Duration::ZERO, report: None });
        assert!(!is_new(&key, folder));
    }

    /// What is logged meanwhile.
    #[cfg(unix)]
    fn logged(code: impl FnOnce()) -> String {
        use std::sync::{Arc, Mutex};
        let log = Arc::new(Mutex::new(Vec::new()));
        struct Writer(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Writer {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().extend(bytes);
                Ok(bytes.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let shared = Arc::clone(&log);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_writer(move || Writer(Arc::clone(&shared)))
            .finish();
        tracing::subscriber::with_default(subscriber, code);
        String::from_utf8(log.lock().unwrap().clone()).unwrap()
    }

    #[cfg(unix)]
    #[test]
    fn whatever_stands_in_the_cache_costs_a_test_and_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path(), key());
        assert!(is_new(&key, folder));
        let path = Remembered::at(folder.into()).find(&key).unwrap();
        let right = fs::read(&path).unwrap();
        let other = Key::of(&Description { capability: Some(90), ..described() }).unwrap();
        assert!(is_new(&other, folder));
        let of_other = Remembered::at(folder.into()).find(&other).unwrap();

        // Plain files, which the right one then replaces.
        type Plant<'p> = (&'p str, &'p dyn Fn());
        let files: [Plant<'_>; 6] = [
            ("empty", &|| fs::write(&path, "").unwrap()),
            ("cut", &|| fs::write(&path, &right[..right.len() / 3]).unwrap()),
            ("garbage", &|| fs::write(&path, [0xff; 5000]).unwrap()),
            ("another's", &|| fs::write(&path, fs::read(&of_other).unwrap()).unwrap()),
            ("behind garbage", &|| fs::write(&path, [b"\n", &right[..]].concat()).unwrap()),
            ("huge", &|| fs::File::create(&path).unwrap().set_len(1 << 40).unwrap()),
        ];
        for (what, plant) in files {
            plant();
            let log = logged(|| assert!(is_new(&key, folder), "{what}"));
            assert!(log.contains("WARN") && log.contains("tested again"), "{what}: {log}");
            let log = logged(|| assert!(!is_new(&key, folder), "{what}"));
            assert_eq!(log, "", "{what}");
        }
        // What is no file stays, and is never waited for.
        let fifo = || {
            let status = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
            assert!(status.success());
        };
        let others: [Plant<'_>; 4] = [
            ("a folder", &|| fs::create_dir(&path).unwrap()),
            ("a pipe", &fifo),
            ("a device", &|| std::os::unix::fs::symlink("/dev/zero", &path).unwrap()),
            ("a link to itself", &|| std::os::unix::fs::symlink(&path, &path).unwrap()),
        ];
        for (what, plant) in others {
            if fs::remove_file(&path).is_err() {
                fs::remove_dir(&path).unwrap();
            }
            plant();
            let log = logged(|| assert!(is_new(&key, folder), "{what}"));
            assert!(log.contains("WARN"), "{what}: {log}");
        }
        // Nowhere to write: a file where the folder would be, and a file system that has none.
        fs::write(folder.join("file"), "").unwrap();
        for nowhere in [folder.join("file"), folder.join("file/below"), "/proc/stepscope".into(), "/dev/full/x".into()]
        {
            for _ in 0..2 {
                let log = logged(|| assert!(is_new(&key, &nowhere), "{nowhere:?}"));
                assert!(log.contains("not remembered"), "{nowhere:?}: {log}");
            }
        }
        // No folder at all.
        let mut tested = false;
        let test = || {
            tested = true;
            Ok(TESTED)
        };
        guard(SelfTest::WhenNew, Some(&key), || None, test).unwrap();
        assert!(tested);
    }

    #[test]
    fn many_open_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path(), key());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| is_new(&key, folder));
            }
        });
        assert!(!is_new(&key, folder));
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1);
    }
}
