//! The L2 cache in lines of 64 KiB, with least-recently-used eviction and write-back.

use std::collections::{BTreeMap, HashMap};

use crate::work::Touch;

const LINE: u64 = 64 << 10;

/// The contents of the cache between launches.
pub(crate) struct Cache {
    lines: usize,
    /// The time of each line's last use, and true if it is dirty.
    held: HashMap<u64, (u64, bool)>,
    oldest: BTreeMap<u64, u64>,
    now: u64,
}

impl Cache {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { lines: (bytes / LINE) as usize, held: HashMap::new(), oldest: BTreeMap::new(), now: 0 }
    }

    /// Returns the bytes that a launch moves to and from memory. Its arguments are touched
    /// concurrently.
    pub(crate) fn run(&mut self, touches: &[Touch]) -> u64 {
        let most = touches.iter().map(|touch| touch.bytes.div_ceil(LINE) * touch.passes).max().unwrap_or(0);
        let mut moved = 0;
        for at in 0..most {
            for touch in touches {
                let lines = touch.bytes.div_ceil(LINE).max(1);
                let (from, to) = (at * lines * touch.passes / most, (at + 1) * lines * touch.passes / most);
                for line in from..to {
                    // Small regions share a line with their neighbors.
                    let bytes = touch.bytes.min(LINE);
                    moved += self.touch(touch.address / LINE + line % lines, bytes, touch);
                }
            }
        }
        moved
    }

    fn touch(&mut self, line: u64, bytes: u64, touch: &Touch) -> u64 {
        self.now += 1;
        let mut moved = 0;
        let dirty = match self.held.get(&line) {
            Some(&(last, dirty)) => {
                self.oldest.remove(&last);
                dirty
            }
            None => {
                moved += if touch.read { bytes } else { 0 };
                while self.held.len() >= self.lines.max(1) {
                    let (_, oldest) = self.oldest.pop_first().expect("as many as are held");
                    if let Some((_, true)) = self.held.remove(&oldest) {
                        moved += LINE;
                    }
                }
                false
            }
        };
        self.held.insert(line, (self.now, dirty || touch.written));
        self.oldest.insert(self.now, line);
        moved
    }
}
