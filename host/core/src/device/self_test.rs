//! Opens a device, and tests kernels that have not passed on it before. A record of kernels that
//! have passed is kept in the user's cache, with one small text file each.
//!
//! Invariant: a device whose kernels failed their test is not returned. A record can only save a
//! test, and never fails or delays opening a device. A file is valid if it begins with exactly the
//! lines of the requested key. Otherwise the kernels are tested again, with a warning.

#![forbid(unsafe_code)]

use super::Device;
use super::builder::{DeviceBuilder, SelfTest};
use super::driver::Description;
use crate::digest::hex;
use crate::error::{Error, Result};
use crate::files::{PlainFile, replace_file};
use cuda_std::launch::inventory;
use etcetera::BaseStrategy;
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A test of all kernels of the library. `stepscope-check` registers one with `inventory::submit!`.
#[derive(Debug)]
pub struct KernelTest {
    /// Runs the test.
    pub run: fn(&Device) -> Result<Tested>,
    /// Returns the committed digests with which the test compares.
    pub digests: fn() -> &'static str,
    /// Returns the committed digests of all cases: what the kernels compute.
    pub results: &'static str,
}

inventory::collect!(KernelTest);

impl KernelTest {
    /// The registered test.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a program that does not link one.
    pub fn registered() -> Result<&'static Self> {
        inventory::iter::<Self>.into_iter().next().ok_or_else(|| {
            Error::misuse(
                "self_test",
                "a build of stepscope with feature `check`, which has the test of kernels",
                "a build without it",
            )
        })
    }
}

/// The result of a passed self-test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tested {
    /// The number of kernels.
    pub kernels: usize,
    /// The time of the test, including the host's part.
    pub elapsed: Duration,
}

impl fmt::Display for Tested {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kernels give the right bits, tested in {:.3} s", self.kernels, self.elapsed.as_secs_f64())
    }
}

impl DeviceBuilder {
    /// Opens the device, and first tests the kernels of a GPU if they are new there. See
    /// [`SelfTest`].
    ///
    /// # Errors
    /// [`Error::NoDevice`], with advice, if the device does not exist or this build cannot drive
    /// it. [`Error::Kernels`] if one of its kernels fails the test, even if
    /// [`DeviceKind::Auto`](crate::DeviceKind::Auto) selected the device. [`Error::Timeout`] if the
    /// driver does not answer. [`Error::Misuse`] for a malformed `STEPSCOPE_CHECKED` or
    /// `STEPSCOPE_SELF_TEST`. It is also returned if two packages of kernels have the same name,
    /// or if a package has the name of stepscope's own.
    pub fn open(self) -> Result<Device> {
        let (when, covered) = (self.tests()?, self.has_layers());
        let device = self.open_untested()?;
        // A device with layers over its driver proves nothing about others.
        let key = if covered || when == SelfTest::Never { None } else { Key::of(device.description())? };
        guard(when, key.as_ref(), Remembered::of_user, || device.self_test())?;
        Ok(device)
    }
}

impl Device {
    /// Runs the smallest case of every kernel of the library and compares its bits with the
    /// committed ones.
    ///
    /// The test takes 2 MiB of the device while it runs. It first waits for previously queued work.
    /// It waits for a GPU for at most two seconds in all, whatever the device's deadline. For each
    /// kernel of the emulator, which runs on the host, it waits for the deadline. Nothing else
    /// should use the device meanwhile, because the test waits for that too.
    ///
    /// Opening a GPU runs this test if its kernels are new: see [`SelfTest`].
    ///
    /// # Errors
    /// [`Error::Kernels`] with the first kernel that returns wrong bits, does not end, or is
    /// refused. After a kernel that does not end, the device is lost. Other errors if the test
    /// cannot run, such as [`Error::DeviceMemory`].
    pub fn self_test(&self) -> Result<Tested> {
        if self.is_dry_run() {
            let got = "a dry run, on which no kernel runs";
            return Err(Error::misuse("self_test", "a device", got));
        }
        (KernelTest::registered()?.run)(self)
    }
}

/// Returns the file that records a passed test of this device's kernels. `None` if there is no such
/// record, or the kernels are no PTX.
pub fn remembered(device: &Device) -> Option<PathBuf> {
    let key = Key::of(device.description()).ok()??;
    Remembered::of_user()?.find(&key)
}

/// Tests the kernels if needed. `key` identifies kernels whose result can be stored. The store is
/// opened only for those.
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

/// The largest valid file.
const MOST_RECORD_BYTES: u64 = 4096;
/// The number of digits of a file's name.
const RECORD_NAME_DIGITS: usize = 32;

/// The key of a test: the source of the kernels, the compiler, the GPU, and the cases.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key(String);

impl Key {
    /// Returns the key of a device, or none for a device without PTX.
    ///
    /// # Errors
    /// [`Error::Misuse`] in a program that links no test of kernels.
    fn of(description: &Description) -> Result<Option<Self>> {
        let Description { name, capability: Some(capability), driver: Some(driver), ptx: Some(ptx), .. } = description
        else {
            return Ok(None);
        };
        let cases = hex(&Sha256::digest((KernelTest::registered()?.digests)()));
        let wgmma = description.wgmma_ptx.as_ref().map_or_else(String::new, |ptx| format!("ptx {ptx}\n"));
        Ok(Some(Self(format!("ptx {ptx}\n{wgmma}gpu {name}, sm_{capability}\ndriver {driver}\ncases {cases}\n"))))
    }

    fn file(&self) -> String {
        format!("{}.txt", &hex(&Sha256::digest(&self.0))[..RECORD_NAME_DIGITS])
    }
}

/// The folder of the records.
#[derive(Clone, Debug)]
struct Remembered {
    folder: PathBuf,
}

impl Remembered {
    /// Opens the user's records: `stepscope/kernels` in the system's cache folder
    /// (`XDG_CACHE_HOME`, or `.cache` in `HOME`). Returns none, with a warning, if there is no such
    /// folder.
    fn of_user() -> Option<Self> {
        let cache = etcetera::choose_base_strategy().ok().map(|base| base.cache_dir());
        // A relative path would be different for each program.
        let Some(cache) = cache.filter(|cache| cache.is_absolute()) else {
            tracing::warn!("no cache folder to record tested kernels in: they are tested whenever a device is opened");
            return None;
        };
        Some(Self::at(cache.join("stepscope").join("kernels")))
    }

    fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns the record that these kernels have passed, if there is one.
    fn find(&self, key: &Key) -> Option<PathBuf> {
        let path = self.folder.join(key.file());
        match read(&path) {
            Ok(text) if text.starts_with(key.0.as_bytes()) => return Some(path),
            Ok(_) => {
                tracing::warn!(path = %path.display(), "this is not a record of tested kernels; they are tested again")
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "unreadable; the kernels are tested again"),
        }
        None
    }

    /// Records that these kernels have passed. Logs a warning if that fails.
    fn remember(&self, key: &Key, tested: Tested) {
        let path = self.folder.join(key.file());
        let text = format!("{}stepscope {}: {tested}\n", key.0, env!("CARGO_PKG_VERSION"));
        let made = fs::create_dir_all(&self.folder).map_err(|reason| Error::file(&self.folder, reason));
        if let Err(error) = made.and_then(|()| replace_file(&path, text.as_bytes())) {
            tracing::warn!(%error, "the kernels passed their test, but this could not be recorded; they are tested again when the device is next opened");
        }
    }

    /// Removes the record of these kernels, because they have failed.
    fn forget(&self, key: &Key) {
        let path = self.folder.join(key.file());
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "this file wrongly records that the kernels passed their test: remove it");
            }
            _ => {}
        }
    }
}

/// Reads a small plain file.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = PlainFile::open(path)?;
    let mut bytes = Vec::new();
    file.take(MOST_RECORD_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Description, DeviceKind};
    use crate::ptx::{PtxBuild, PtxCompiler};

    // The library's test is `stepscope-check`'s, which this crate cannot name.
    inventory::submit! {
        KernelTest { run: |_| Ok(TESTED), digests: || "digests", results: "digests" }
    }

    const TESTED: Tested = Tested { kernels: 49, elapsed: Duration::from_millis(50) };

    fn ptx(sha256: &str) -> Option<PtxBuild> {
        Some(PtxBuild { arch: "sm_121", sha256: sha256.into(), compiler: PtxCompiler::RustCuda })
    }

    /// Returns the description of a GPU.
    fn described() -> Description {
        let description = Device::open(DeviceKind::Emulated).unwrap().description().clone();
        let driver = Some("CUDA 13.0, driver 580.1".into());
        Description { name: "NVIDIA Made Up".into(), capability: Some(121), driver, ptx: ptx("00ff"), ..description }
    }

    fn key() -> Key {
        Key::of(&described()).unwrap().expect("a device with PTX")
    }

    /// Returns true if the kernels, which are correct, get tested.
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
        // A changed value of each kind is tested once too.
        let others = [
            Description { ptx: ptx("other"), ..described() },
            Description { driver: Some("other".into()), ..described() },
            Description { name: "NVIDIA Other".into(), ..described() },
            Description { capability: Some(90), ..described() },
            Description { wgmma_ptx: ptx("01"), ..described() },
            Description { wgmma_ptx: ptx("02"), ..described() },
        ];
        for (number, other) in others.iter().map(|other| Key::of(other).unwrap().unwrap()).enumerate() {
            assert!(is_new(&other, &folder), "{number}");
            assert!(!is_new(&other, &folder), "{number}");
            assert_eq!(fs::read_dir(&folder).unwrap().count(), number + 2);
        }
        assert!(!is_new(&key, &folder));
    }

    #[test]
    fn devices_without_ptx_are_not_cached() {
        let device = Device::open(DeviceKind::Emulated).unwrap();
        assert_eq!(Key::of(device.description()), Ok(None));
        let folder = tempfile::tempdir().unwrap();
        for (when, tested) in [(SelfTest::WhenNew, false), (SelfTest::Always, true), (SelfTest::Never, false)] {
            assert_eq!(is_tested(when, None, folder.path()), tested);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn wrong_kernels_clear_the_cache() {
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
        // A lack of memory proves nothing about kernels.
        fails(SelfTest::Always, &Error::Timeout { call: "allocate", waited: Duration::ZERO, report: None });
        assert!(!is_new(&key, folder));
    }

    /// Returns what is logged while `code` runs.
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
    fn damaged_cache_causes_test_and_warning() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, key) = (folder.path(), key());
        assert!(is_new(&key, folder));
        let path = Remembered::at(folder.into()).find(&key).unwrap();
        let right = fs::read(&path).unwrap();
        let other = Key::of(&Description { capability: Some(90), ..described() }).unwrap().unwrap();
        assert!(is_new(&other, folder));
        let of_other = Remembered::at(folder.into()).find(&other).unwrap();

        // Plain files, which the correct one then replaces.
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
        // A path that is not a plain file stays, and is never waited for.
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
        // Paths that cannot be written: a file in place of the folder, and a file system without
        // folders.
        fs::write(folder.join("file"), "").unwrap();
        for nowhere in [folder.join("file"), folder.join("file/below"), "/proc/stepscope".into(), "/dev/full/x".into()]
        {
            for _ in 0..2 {
                let log = logged(|| assert!(is_new(&key, &nowhere), "{nowhere:?}"));
                assert!(log.contains("could not be recorded"), "{nowhere:?}: {log}");
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
