//! What ranks of a group say to each other, on any bytes, as a rank would hear them at each stage of a conversation.
//!
//! Invariant: bytes are a message or an error; a message that is said again is heard as the same, and no beginning of it is one; no kind
//! has a body that is longer than it may be. With `STEPSCOPE_PLANT` set a message is cut before it is said again.

#![no_main]

#[path = "../../host/group/fault.rs"]
#[allow(dead_code, unreachable_pub, reason = "a module of the library")]
mod fault;
#[path = "../../host/group/wire.rs"]
#[allow(dead_code, reason = "a module of the library")]
mod wire;

use libfuzzer_sys::fuzz_target;
use wire::{Message, Stage, WireError, read};

/// Bytes of the longest message: a piece of data, with what is before it.
const LONGEST: usize = (1 << 20) + 5;

fuzz_target!(|bytes: &[u8]| {
    for stage in [Stage::Introduction, Stage::Meeting, Stage::Group] {
        let mut rest = bytes;
        loop {
            let before = rest;
            match read(&mut rest, stage) {
                Ok(message) => {
                    assert!(before.len() - rest.len() <= LONGEST);
                    is_heard_again(message, stage);
                }
                Err(error) => {
                    assert_eq!(error == WireError::Ended, before.is_empty(), "{error}");
                    assert!(!error.to_string().is_empty());
                    break;
                }
            }
        }
    }
});

fn is_heard_again(message: Message, stage: Stage) {
    let mut frame = message.frame();
    if std::env::var_os("STEPSCOPE_PLANT").is_some() {
        frame.pop();
    }
    assert_eq!(read(&mut &frame[..], stage).as_ref(), Ok(&message));
    for end in 1..frame.len().min(200) {
        assert_eq!(read(&mut &frame[..end], stage), Err(WireError::Cut));
    }
    // What it says can be shown.
    match message {
        Message::Refused(fault) => assert!(!fault.to_string().is_empty()),
        Message::Fault(fault) => assert!(!fault.to_string().is_empty()),
        _ => {}
    }
}
