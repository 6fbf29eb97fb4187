//! A folder of shards that is replaced during a read: the result is one state or the other.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use stepscope::files::StateDict;

const TENSORS: usize = 12;
const VALUES: usize = 64;

/// Returns a state in which all values are its number.
fn state(number: u32) -> StateDict {
    let mut tensors = StateDict::default();
    for at in 0..TENSORS {
        tensors.insert(format!("tensor.{at:02}"), [VALUES], vec![number as f32; VALUES]).unwrap();
    }
    tensors
}

/// Two states in shards of the same names, in shards of other names, and one in one file.
#[test]
fn no_read_mixes_two_states() {
    for shards in [[Some(512), Some(512)], [Some(512), Some(1024)], [Some(512), None]] {
        let folder = tempfile::tempdir().unwrap();
        state(0).save_pretrained(folder.path(), shards[0]).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1.. {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    state(number).save_pretrained(folder.path(), shards[number as usize % 2]).unwrap();
                }
            });
            let (mut whole, mut refused) = (0, 0);
            for _ in 0..300 {
                // While files are renamed, there may be no state, or files of both: an error.
                let Ok(found) = StateDict::from_pretrained(folder.path(), |_| false) else {
                    refused += 1;
                    continue;
                };
                let all: Vec<f32> = found.iter().flat_map(|(.., values)| values.to_vec()).collect();
                assert!(
                    all.len() == TENSORS * VALUES && all.iter().all(|&value| value == all[0]),
                    "{shards:?}: {all:?}"
                );
                whole += 1;
            }
            done.store(true, Ordering::Relaxed);
            println!("{shards:?}: {whole} read whole, {refused} refused");
        });
        let last = StateDict::from_pretrained(folder.path(), |_| false).unwrap();
        assert_eq!(last.iter().count(), TENSORS);
    }
}
