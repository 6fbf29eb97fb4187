//! The lock of a run's folder: whatever file has its name, only a lock is written to.

#![cfg(unix)]
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use stepscope::files::RunLock;
use tempfile::TempDir;

/// Returns a folder, the path of its lock, and a file elsewhere that must not change.
fn workplace() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    fs::create_dir(&out).unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "31337").unwrap();
    (folder, out.join(".stepscope-lock"), precious)
}

/// Checks that locking the folder is refused at once, with these words.
#[track_caller]
fn refused(lock: &Path, expected: &str) {
    let begun = Instant::now();
    let error = RunLock::hold(lock.parent().unwrap()).unwrap_err().to_string();
    assert!(error.contains(".stepscope-lock: ") && error.contains(expected), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_link_is_not_followed() {
    let (folder, lock, precious) = workplace();
    for target in [precious.clone(), folder.path().join("absent"), PathBuf::from("/dev/null"), folder.path().into()] {
        symlink(&target, &lock).unwrap();
        refused(&lock, "expected a plain file, got a symbolic link");
        fs::remove_file(&lock).unwrap();
    }
    assert_eq!(fs::read_to_string(&precious).unwrap(), "31337");
    assert!(!folder.path().join("absent").exists(), "the lock must create nothing through a link");
}

#[test]
fn hard_linked_file_is_kept() {
    let (_folder, lock, precious) = workplace();
    fs::hard_link(&precious, &lock).unwrap();
    refused(&lock, "got one file with 2 names: move it away");
    assert_eq!(fs::read_to_string(&precious).unwrap(), "31337");
    assert!(lock.exists());
}

#[test]
fn foreign_file_is_kept() {
    let (_folder, lock, _) = workplace();
    for contents in ["text", "12 ", "-1", "99999999999", "1.5", "\u{ff11}", &"1".repeat(1 << 20)] {
        fs::write(&lock, contents).unwrap();
        refused(&lock, "expected the lock of an earlier run, which contains its process id, got something else");
        assert_eq!(fs::read_to_string(&lock).unwrap(), contents);
    }
    fs::write(&lock, [0xff; 4]).unwrap();
    refused(&lock, "got something else");
}

#[test]
fn only_files_can_be_locks() {
    let (_folder, lock, _) = workplace();
    fs::create_dir(&lock).unwrap();
    refused(&lock, "got a folder");
    fs::remove_dir(&lock).unwrap();
    assert!(Command::new("mkfifo").arg(&lock).status().unwrap().success());
    refused(&lock, "got a pipe");
}

/// The files of processes killed before or after they wrote their number.
#[test]
fn lock_of_dead_run_is_taken() {
    let (_folder, lock, _) = workplace();
    for contents in ["", "1", "4294967295"] {
        fs::write(&lock, contents).unwrap();
        let held = RunLock::hold(lock.parent().unwrap()).unwrap();
        assert_eq!(fs::read_to_string(&lock).unwrap(), std::process::id().to_string());
        drop(held);
        assert!(!lock.exists());
    }
}

/// The target of a link does not change while another thread puts links in the lock's place.
#[test]
fn changing_links_are_never_written() {
    let (_folder, lock, precious) = workplace();
    let out = lock.parent().unwrap();
    std::thread::scope(|scope| {
        let links = scope.spawn(|| {
            for _ in 0..3000 {
                for linked in [symlink(&precious, &lock), fs::hard_link(&precious, &lock)] {
                    if linked.is_ok() {
                        let _ = fs::remove_file(&lock);
                    }
                }
            }
        });
        while !links.is_finished() {
            drop(RunLock::hold(out));
        }
        links.join().unwrap();
    });
    assert_eq!(fs::read_to_string(&precious).unwrap(), "31337");
}
