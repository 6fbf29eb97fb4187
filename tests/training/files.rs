//! Files: only plain files are read, changes are detected, and files left by killed processes are
//! removed.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::files::{PlainFile, RunLock, replace_file};
use stepscope::{Checkpoint, Error};

/// Far more than any of this takes.
const LONG: Duration = Duration::from_secs(20);
/// The environment variable with the path for a test's child process.
const CHILD: &str = "STEPSCOPE_TEST_FILES";

fn names_in(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Starts this program again, with one test and a path for it.
fn child(test: &str, path: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test]).env(CHILD, path).stdout(Stdio::null());
    command.spawn().unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Appended bytes are not read, because the length is taken when the file is opened.
#[test]
fn files_are_read_to_their_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "before").unwrap();
    let mut file = PlainFile::open(&path).unwrap();
    file.check_unchanged().unwrap();
    File::options().append(true).open(&path).unwrap().write_all(b" and after").unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), file.len()), ("before", 6));
    let message = file.check_unchanged().unwrap_err().to_string();
    assert!(message.contains("had 6 bytes") && message.contains("has 16 now"), "{message}");
    file.rewind().unwrap();
    text.clear();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "before");
}

/// A write to the open file is detected. A replacement is another file, so the open one stays
/// unchanged.
#[test]
fn writes_are_detected_but_not_replacements() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    let mut file = PlainFile::open(&path).unwrap();
    replace_file(&path, b"new").unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    file.check_unchanged().unwrap();

    let file = PlainFile::open(&path).unwrap();
    wait_until("the time of modification changes", || {
        fs::write(&path, "NEW").unwrap();
        file.check_unchanged().is_err_and(|error| error.to_string().contains("was written to"))
    });
}

/// A reader never reaches the end, or the start, of these files.
#[cfg(unix)]
#[test]
fn only_plain_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let [pipe, link] = ["pipe", "link"].map(|name| folder.path().join(name));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::os::unix::fs::symlink(&pipe, &link).unwrap();
    let start = Instant::now();
    let device = Path::new("/dev/zero");
    for (path, kind) in [(folder.path(), "a folder"), (&pipe, "a pipe"), (&link, "a pipe"), (device, "a device")] {
        let error = PlainFile::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let message = error.to_string();
        assert!(message.contains("expected a plain file") && message.contains(kind), "{message}");
    }
    assert_eq!(PlainFile::open(folder.path().join("absent")).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(start.elapsed() < Duration::from_secs(2));
    for path in [&pipe, &link] {
        let error = replace_file(path, b"bytes").unwrap_err().to_string();
        assert!(error.contains("expected a plain file, got a pipe"), "{error}");
    }
    assert_eq!(names_in(folder.path()), ["link", "pipe"]);
    fs::write(folder.path().join("empty"), "").unwrap();
    assert!(PlainFile::open(folder.path().join("empty")).unwrap().is_empty());
}

/// A path that leads alternately to a file and to a pipe.
#[cfg(unix)]
#[test]
fn changing_path_never_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let [path, file, pipe] = ["path", "file", "pipe"].map(|name| folder.path().join(name));
    fs::write(&file, "text").unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let place = folder.path().join("place");
            for target in [&file, &pipe].into_iter().cycle() {
                fs::hard_link(target, &place).unwrap();
                fs::rename(&place, &path).unwrap();
                // Renaming a file to another name of itself has no effect.
                let _ = fs::remove_file(&place);
                if done.load(Ordering::SeqCst) > 0 {
                    break;
                }
            }
        });
        wait_until("the path is there", || path.exists());
        // On a busy machine only one of the two threads may run for long: repeat until both cases
        // occurred.
        let (mut files, mut refused, mut strange) = (0, 0, Vec::new());
        while strange.is_empty() && (files + refused < 20_000 || files == 0 || refused == 0) {
            match PlainFile::open(&path) {
                Ok(file) if file.len() == 4 => files += 1,
                Err(error) if error.kind() == ErrorKind::InvalidInput => refused += 1,
                Ok(file) => strange.push(format!("a file of {} bytes", file.len())),
                Err(error) => strange.push(error.to_string()),
            }
        }
        done.store(1, Ordering::SeqCst);
        assert_eq!(strange, [""; 0]);
    });
}

#[test]
fn folder_has_one_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let lock = RunLock::hold(folder.path()).unwrap();
    let Error::File { path, reason } = RunLock::hold(folder.path()).unwrap_err() else {
        panic!("expected an error about a file")
    };
    assert_eq!(path, folder.path());
    assert!(reason.contains(&format!("another run (process {}) writes here", std::process::id())), "{reason}");
    drop(lock);
    assert_eq!(names_in(folder.path()), [""; 0]);
    drop(RunLock::hold(folder.path()).unwrap());
    let absent = folder.path().join("absent");
    assert!(matches!(RunLock::hold(&absent), Err(Error::File { path, .. }) if path.starts_with(&absent)));
}

#[test]
fn only_one_thread_gets_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let inside = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let start = Instant::now();
                for _ in 0..50 {
                    let lock = std::iter::repeat_with(|| RunLock::hold(folder.path())).find_map(|lock| {
                        assert!(start.elapsed() < 3 * LONG, "the lock was never released");
                        lock.inspect_err(|error| assert!(error.to_string().contains("another run"), "{error}")).ok()
                    });
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two threads hold the lock");
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(lock);
                }
            });
        }
    });
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn lock_of_killed_run_is_released() {
    const NAME: &str = "files::lock_of_killed_run_is_released";
    if let Some(folder) = std::env::var_os(CHILD) {
        // The parent tests the lock by taking it for a moment.
        let _lock = loop {
            if let Ok(lock) = RunLock::hold(&folder) {
                break lock;
            }
        };
        thread::sleep(LONG);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let child = child(NAME, folder.path());
    let mut refused = String::new();
    wait_until("the child has the folder", || {
        RunLock::hold(folder.path()).is_err_and(|error| {
            refused = error.to_string();
            refused.contains("process")
        })
    });
    assert!(refused.contains(&format!("(process {})", child.id())), "{refused}");
    kill(child);
    assert_eq!(names_in(folder.path()).len(), 1, "a killed process leaves its lock file");
    drop(RunLock::hold(folder.path()).unwrap());
    assert_eq!(names_in(folder.path()), [""; 0]);
}

/// Child processes replace a file repeatedly and are killed. The next replacement removes their
/// temporary files, but never that of a live process.
#[test]
fn killed_processes_temporary_files_are_swept() {
    const NAME: &str = "files::killed_processes_temporary_files_are_swept";
    if let Some(path) = std::env::var_os(CHILD) {
        let bytes = vec![1; 1 << 20];
        loop {
            replace_file(Path::new(&path), &bytes).unwrap();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut left = 0;
    // Enough that most are killed during a write.
    for _ in 0..10 {
        let child = child(NAME, &path);
        let temporary = || names_in(folder.path()).iter().any(|name| name.ends_with("-tmp"));
        wait_until("the child writes", || path.exists() && temporary());
        kill(child);
        left += usize::from(temporary());
        replace_file(&path, b"whole").unwrap();
        assert_eq!(names_in(folder.path()), ["file"]);
        fs::remove_file(&path).unwrap();
    }
    assert!(left > 0, "no child was killed during a write");
}

/// Some threads write, and some only sweep, as a load does. No writer's temporary file is removed.
#[test]
fn concurrent_replacements_keep_files_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let writing = AtomicUsize::new(2);
    thread::scope(|scope| {
        for number in 0..2u8 {
            let (path, writing) = (&path, &writing);
            scope.spawn(move || {
                let replaced = (0..1000).try_for_each(|_| replace_file(path, &[number; 5000]));
                writing.fetch_sub(1, Ordering::SeqCst);
                replaced.unwrap();
            });
            scope.spawn(move || {
                while writing.load(Ordering::SeqCst) > 0 {
                    assert!(Checkpoint::load(path).is_err());
                }
            });
        }
    });
    let bytes = fs::read(&path).unwrap();
    assert!(bytes.len() == 5000 && bytes.iter().all(|byte| *byte == bytes[0]));
    assert_eq!(names_in(folder.path()), ["file"]);
}

#[test]
fn others_files_are_not_swept() {
    let folder = tempfile::tempdir().unwrap();
    // Too long, too short, of another name, not a file, a link.
    let kept =
        [".file.backup7.stepscope-tmp", ".file..stepscope-tmp", ".other.abcdef.stepscope-tmp", ".file.abcdef.tmp"];
    for name in kept {
        fs::write(folder.path().join(name), "kept").unwrap();
    }
    fs::create_dir(folder.path().join(".file.folder.stepscope-tmp")).unwrap();
    let before = names_in(folder.path());
    fs::write(folder.path().join(".file.abcdef.stepscope-tmp"), "of a dead process").unwrap();
    let live = File::create(folder.path().join(".file.alive1.stepscope-tmp")).unwrap();
    live.lock().unwrap();
    replace_file(folder.path().join("file"), b"whole").unwrap();
    let mut expected = [&before[..], &[".file.alive1.stepscope-tmp".into(), "file".into()]].concat();
    expected.sort();
    assert_eq!(names_in(folder.path()), expected);
}

#[test]
fn longest_name_can_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join(OsString::from("ö".repeat(127)));
    replace_file(&path, b"one").unwrap();
    replace_file(&path, b"two").unwrap();
    assert_eq!((fs::read(&path).unwrap(), names_in(folder.path()).len()), (b"two".to_vec(), 1));
}

/// The system's error for a folder in which even root cannot create a file.
#[cfg(target_os = "linux")]
#[test]
fn system_errors_are_passed_on() {
    let path = Path::new("/proc/stepscope");
    let Err(Error::File { path: named, reason }) = replace_file(path, b"bytes") else {
        panic!("a file in /proc cannot be replaced")
    };
    assert!(named == path && !reason.is_empty(), "{reason}");
    assert!(matches!(RunLock::hold("/proc"), Err(Error::File { .. })));
}
