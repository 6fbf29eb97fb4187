//! The lock of a run's folder: whatever stands under its name, nothing but a lock is written to.

#![cfg(unix)]
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use stepscope::RunLock;
use tempfile::TempDir;

/// A folder, the path of its lock, and a file elsewhere that must stay as it is.
fn workplace() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    fs::create_dir(&out).unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "31337").unwrap();
    (folder, out.join(".stepscope-lock"), precious)
}

/// Taking the folder is refused at once, and says this.
#[track_caller]
fn refused(lock: &Path, told: &str) {
    let begun = Instant::now();
    let error = RunLock::hold(lock.parent().unwrap()).unwrap_err().to_string();
    assert!(error.contains(".stepscope-lock: ") && error.contains(told), "{error}");
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
    assert!(!folder.path().join("absent").exists(), "nothing was made through a link");
}

#[test]
fn a_file_with_a_second_name_is_left() {
    let (_folder, lock, precious) = workplace();
    fs::hard_link(&precious, &lock).unwrap();
    refused(&lock, "got one file with 2 names: move it away");
    assert_eq!(fs::read_to_string(&precious).unwrap(), "31337");
    assert!(lock.exists());
}

#[test]
fn a_file_of_somebody_else_is_left() {
    let (_folder, lock, _) = workplace();
    for contents in ["text", "12 ", "-1", "99999999999", "1.5", "\u{ff11}", &"1".repeat(1 << 20)] {
        fs::write(&lock, contents).unwrap();
        refused(&lock, "expected a lock of an earlier run, which holds its process's number, got something else");
        assert_eq!(fs::read_to_string(&lock).unwrap(), contents);
    }
    fs::write(&lock, [0xff; 4]).unwrap();
    refused(&lock, "got something else");
}

#[test]
fn what_is_no_file_is_refused() {
    let (_folder, lock, _) = workplace();
    fs::create_dir(&lock).unwrap();
    refused(&lock, "got a folder");
    fs::remove_dir(&lock).unwrap();
    assert!(Command::new("mkfifo").arg(&lock).status().unwrap().success());
    refused(&lock, "got a pipe");
}

/// What a process leaves that was killed before it wrote its number, or later.
#[test]
fn the_lock_of_a_dead_run_is_taken() {
    let (_folder, lock, _) = workplace();
    for contents in ["", "1", "4294967295"] {
        fs::write(&lock, contents).unwrap();
        let held = RunLock::hold(lock.parent().unwrap()).unwrap();
        assert_eq!(fs::read_to_string(&lock).unwrap(), std::process::id().to_string());
        drop(held);
        assert!(!lock.exists());
    }
}

/// While another puts links in the lock's place, the file that they lead to stays as it is.
#[test]
fn a_link_that_comes_and_goes_is_never_written() {
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
