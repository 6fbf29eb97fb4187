//! Fuzzes the messages between ranks of a group with arbitrary bytes, as received at each stage of
//! a connection.
//!
//! Invariant: bytes are a message or an error. An encoded message decodes to the same message, none
//! of its prefixes is a message, and no kind has a body above its limit. With `STEPSCOPE_PLANT`
//! set, a message is truncated before it is encoded again.

#![no_main]

#[path = "../../host/group/src/wire.rs"]
#[allow(dead_code, reason = "a module of the library")]
mod wire;

use libfuzzer_sys::fuzz_target;
use wire::{Message, Stage, WireError, read};

/// Bytes of the longest message: a piece of data with its header.
const LONGEST: usize = (1 << 20) + 5;

fuzz_target!(|bytes: &[u8]| {
    for stage in [Stage::Introduction, Stage::Rendezvous, Stage::Group] {
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
    // Its text can be formatted.
    match message {
        Message::Refused(fault) => assert!(!fault.to_string().is_empty()),
        Message::Fault(fault) => assert!(!fault.to_string().is_empty()),
        _ => {}
    }
}
