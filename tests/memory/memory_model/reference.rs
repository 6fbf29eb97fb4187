//! The reference allocator: only numbers, with which the arena must agree.
//!
//! Invariant: it knows no device and no address. The place of a tensor follows from sizes and the
//! order of requests.

use stepscope::report::{ArenaReport, Cause};

/// The alignment of every tensor's bytes.
const ALIGN_BYTES: usize = 256;
/// The bytes that checked mode adds after every tensor.
const GUARD_BYTES: usize = 256;

/// The place of a tensor, and the bytes that it takes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Arena {
        offset: usize,
        padded: usize,
    },
    /// The place of a freed tensor.
    Again {
        offset: usize,
        padded: usize,
    },
    Pool {
        padded: usize,
    },
}

/// The state at the beginning of a scope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    offset: usize,
    blocks: usize,
    alive: u64,
    /// The outer scope's beginning and its number of freed blocks, while this scope runs.
    scope: (usize, usize),
    given_back: usize,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Reference {
    pub(crate) capacity_bytes: usize,
    /// The limit of a step's pool memory; `None` without a pool.
    pub(crate) cap_bytes: Option<usize>,
    guarded: bool,
    pub(crate) offset: usize,
    high_water: usize,
    /// The most that a step would have taken, including refused requests: the size to which an
    /// arena grows.
    pub(crate) needed: usize,
    /// The bytes of each pool block of the step.
    blocks: Vec<usize>,
    /// Freed blocks, by offset and bytes: those of the running scope are the last.
    given_back: Vec<(usize, usize)>,
    /// The beginning of the running scope, and its first freed block.
    scope: (usize, usize),
    /// The tensors of the scopes that have not ended.
    pub(crate) alive: u64,
    pub(crate) resets: u64,
    pub(crate) growths: u64,
    allocations: u64,
    bytes: u64,
    largest: u64,
    pub(crate) overflows: u64,
    overflow_bytes: u64,
    peak: u64,
    pub(crate) refusals: u64,
    /// The blocks that a planted failure kept from being freed.
    pub(crate) leaked: u64,
}

impl Reference {
    pub(crate) fn new(capacity_bytes: usize, cap_bytes: Option<usize>, guarded: bool) -> Self {
        Self { capacity_bytes, cap_bytes, guarded, ..Self::default() }
    }

    /// Returns the bytes that a tensor takes, or `None` if they overflow.
    pub(crate) fn padded(&self, elements: usize) -> Option<usize> {
        let guard = if self.guarded { GUARD_BYTES } else { 0 };
        let bytes = elements.checked_mul(size_of::<f32>())?;
        Some(
            bytes
                .checked_next_multiple_of(ALIGN_BYTES)
                .and_then(|bytes| bytes.checked_add(guard))
                .unwrap_or(usize::MAX)
                .max(ALIGN_BYTES),
        )
    }

    pub(crate) fn place(&self, padded: usize) -> Result<Block, Cause> {
        let again = self.given_back[self.scope.1..].iter().rfind(|(_, bytes)| *bytes == padded);
        if let Some(&(offset, _)) = again {
            return Ok(Block::Again { offset, padded });
        }
        if self.offset.checked_add(padded).is_some_and(|end| end <= self.capacity_bytes) {
            return Ok(Block::Arena { offset: self.offset, padded });
        }
        let used = self.pool_bytes().checked_add(padded);
        match self.cap_bytes {
            Some(cap) if used.is_some_and(|used| used <= cap) => Ok(Block::Pool { padded }),
            _ if padded > self.capacity_bytes => Err(Cause::RequestLargerThanArena),
            _ => Err(Cause::WorkingSetLargerThanArena),
        }
    }

    pub(crate) fn take(&mut self, block: Block) {
        let bytes = match block {
            Block::Arena { padded, .. } => {
                self.offset += padded;
                padded
            }
            Block::Again { offset, .. } => {
                let at = self.given_back.iter().rposition(|(given, _)| *given == offset).expect("the offset was freed");
                self.given_back.remove(at);
                // Its bytes are counted already.
                0
            }
            Block::Pool { padded } => {
                self.blocks.push(padded);
                self.overflows += 1;
                self.overflow_bytes += padded as u64;
                self.peak = self.peak.max(self.pool_bytes() as u64);
                padded
            }
        };
        self.allocations += 1;
        self.alive += 1;
        self.bytes += bytes as u64;
        self.largest = self.largest.max(bytes as u64);
        self.high_water = self.high_water.max(self.offset + self.pool_bytes());
    }

    /// Frees a tensor. With guards after tensors, freed blocks are not reused.
    pub(crate) fn give_back(&mut self, block: Block) {
        let (Block::Arena { offset, padded } | Block::Again { offset, padded }) = block else { return };
        if offset >= self.scope.0 && !self.guarded {
            self.given_back.push((offset, padded));
        }
    }

    /// Counts a request, whatever its outcome.
    pub(crate) fn need(&mut self, padded: usize) {
        if matches!(self.place(padded), Ok(Block::Again { .. })) {
            return;
        }
        self.needed = self.needed.max(self.offset.saturating_add(self.pool_bytes()).saturating_add(padded));
    }

    fn pool_bytes(&self) -> usize {
        self.blocks.iter().sum()
    }

    /// Begins a scope.
    pub(crate) fn begin(&mut self) -> Mark {
        let given_back = self.given_back.len();
        let scope = std::mem::replace(&mut self.scope, (self.offset, given_back));
        Mark { offset: self.offset, blocks: self.blocks.len(), alive: self.alive, scope, given_back }
    }

    /// Ends a scope.
    pub(crate) fn rewind(&mut self, mark: Mark) {
        (self.offset, self.alive, self.scope) = (mark.offset, mark.alive, mark.scope);
        self.given_back.truncate(mark.given_back);
        self.blocks.truncate(mark.blocks);
    }

    /// Returns the difference from the arena's own report, between two steps.
    pub(crate) fn differs(&self, report: &ArenaReport) -> Option<String> {
        let overflow = &report.overflow;
        let sites: u64 = report.sites.iter().map(|site| site.count.bytes).sum();
        let phases: u64 = report.phases.iter().map(|(_, count)| count.bytes).sum();
        let figures = [
            ("capacity_bytes", report.capacity_bytes as u64, self.capacity_bytes as u64),
            ("offset_bytes", report.offset_bytes as u64, 0),
            ("high_water_bytes", report.high_water_bytes as u64, self.high_water as u64),
            ("resets", report.resets, self.resets),
            ("passes_since_reset", report.passes_since_reset, 0),
            ("allocations", report.allocations, self.allocations),
            ("largest", report.largest.as_ref().map_or(0, |largest| largest.bytes), self.largest),
            ("growths", report.growths, self.growths),
            ("bytes of all sites", sites, self.bytes),
            ("bytes of all phases", phases, self.bytes),
            ("overflow.allocations", overflow.allocations, self.overflows),
            ("overflow.bytes", overflow.bytes, self.overflow_bytes),
            ("overflow.peak_bytes", overflow.peak_bytes, self.peak),
            ("overflow.refusals", overflow.refusals, self.refusals),
            ("overflow.timeouts", overflow.timeouts, 0),
        ];
        let wrong = figures.iter().find(|(_, got, want)| got != want);
        wrong.map(|(name, got, want)| format!("{name} is {got}, but should be {want}"))
    }
}
