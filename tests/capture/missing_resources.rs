//! Errors that name a resource which the system does not provide.
//!
//! Each test starts its program again, with less of that resource.

#![forbid(unsafe_code)]

use std::error::Error as _;
use std::process::Command;
use stepscope::data::Loader;
use stepscope::error::Resource;
use stepscope::group::GroupConfig;
use stepscope::{Device, DeviceKind, Error, Result};

/// The environment variable that makes a test play the child process.
const CHILD: &str = "STEPSCOPE_TEST_WITHOUT";

/// Returns true in the child process. Otherwise runs `test` in one, after `prelude` of a shell.
fn is_child(test: &str, prelude: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let output = Command::new("sh")
        .args(["-c", &format!("{prelude}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("missing_resources::{test}"), "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// Checks that the error names its operation and the missing resource, and has the system's cause.
#[track_caller]
fn names(error: &Error, of_op: &str, missing: Resource) {
    let Error::System { op, resource, source } = error else { panic!("{error}") };
    assert_eq!((*op, *resource), (of_op, missing), "{error}");
    assert_eq!(error.source().expect("a cause").to_string(), source.to_string());
    let text = format!("{of_op}: the system provided no {missing}: {source}; ");
    assert!(error.to_string().starts_with(&text), "{error}");
}

/// No stack of this size can be mapped, so no thread starts.
#[test]
fn missing_thread_is_named() {
    if is_child("missing_thread_is_named", "export RUST_MIN_STACK=70368744177664") {
        names(&Device::open(DeviceKind::Emulated).unwrap_err(), "device", Resource::Thread);
        let batches = std::iter::empty::<Result<u32>>();
        names(&Loader::new(batches).unwrap_err(), "loader", Resource::Thread);
    }
}

/// A socket is a file, and the process may open no more of them.
#[test]
fn missing_port_is_named() {
    if is_child("missing_port_is_named", "ulimit -n 64") {
        let mut files = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        names(&GroupConfig::on_this_host(2).unwrap_err(), "group", Resource::Port);
        drop(files);
        GroupConfig::on_this_host(2).unwrap();
    }
}
