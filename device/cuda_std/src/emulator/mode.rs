//! The mode of launches: with or without race detection, in the usual order or in a shuffled one.
//!
//! Invariant: a kernel without races gives the same bits in every mode. A shuffled launch runs one
//! block at a time. A seed therefore determines the complete order, and a fault that it reveals can
//! be reproduced.

use std::cell::Cell;
use std::env;
use std::sync::LazyLock;

/// The variable that turns on race detection for every launch if it is `1`.
const RACES_VARIABLE: &str = "STEPSCOPE_RACES";
/// The variable with a seed, from which the order of blocks and threads is drawn.
const SHUFFLE_VARIABLE: &str = "STEPSCOPE_SHUFFLE";

static ENVIRONMENT: LazyLock<Result<Mode, String>> = LazyLock::new(|| {
    // No valid value contains a replacement character.
    let value = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    Mode::parse(value(RACES_VARIABLE).as_deref(), value(SHUFFLE_VARIABLE).as_deref())
});

thread_local! {
    static SCOPE: Cell<Option<Mode>> = const { Cell::new(None) };
}

/// The mode in which the emulator runs kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// True if races, reads of unwritten shared memory and accesses outside an argument are faults.
    pub races: bool,
    /// The seed of a shuffled order of blocks and threads. None: blocks run in parallel, and
    /// threads in ascending order.
    pub shuffle: Option<u64>,
}

impl Mode {
    /// The mode with race detection, in the usual order.
    pub const RACES: Self = Self { races: true, shuffle: None };

    /// Returns the mode that `STEPSCOPE_RACES` (0 or 1) and `STEPSCOPE_SHUFFLE` (a seed) select.
    /// Both are read once, at the first call.
    ///
    /// # Errors
    /// Returns the invalid value and its variable.
    pub fn from_environment() -> Result<Self, String> {
        ENVIRONMENT.clone()
    }

    /// Runs `code`. Launches that this OS thread makes meanwhile run in this mode, independent of
    /// the environment.
    pub fn scope<R>(self, code: impl FnOnce() -> R) -> R {
        struct Outer(Option<Mode>);
        impl Drop for Outer {
            fn drop(&mut self) {
                SCOPE.set(self.0);
            }
        }
        let _outer = Outer(SCOPE.replace(Some(self)));
        code()
    }

    /// Returns the mode of this OS thread's current [`Mode::scope`]. Code that launches on another
    /// OS thread in its place needs it.
    pub fn of_thread() -> Option<Self> {
        SCOPE.get()
    }

    /// Returns the mode of a launch that this OS thread makes now.
    ///
    /// # Panics
    /// Panics if the environment's variables are invalid. Code that opens a device checks them
    /// first.
    pub(super) fn current() -> Self {
        SCOPE.get().unwrap_or_else(|| Self::from_environment().unwrap_or_else(|found| panic!("no mode: {found}")))
    }

    fn parse(races: Option<&str>, shuffle: Option<&str>) -> Result<Self, String> {
        let races = match races {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => return Err(format!("`{other}` in {RACES_VARIABLE}")),
        };
        let seed = |text: &str| text.parse().map_err(|_| format!("`{text}` in {SHUFFLE_VARIABLE}"));
        Ok(Self { races, shuffle: shuffle.map(seed).transpose()? })
    }
}

/// A random permutation.
#[derive(Debug)]
pub(super) struct Order {
    things: Vec<u32>,
    /// The state of SplitMix64 (Steele, Lea and Flood, 2014).
    random: u64,
}

impl Order {
    /// Returns a permutation of `0..count` derived from `seed`, a different one for each `stream`.
    pub(super) fn new(count: u32, seed: u64, stream: u64) -> Self {
        let random = seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        let mut order = Self { things: (0..count).collect(), random };
        order.draw();
        order
    }

    /// Draws another permutation.
    pub(super) fn draw(&mut self) {
        for end in (1..self.things.len()).rev() {
            let place = (u128::from(split_mix(&mut self.random)) * (end as u128 + 1)) >> 64;
            self.things.swap(end, place as usize);
        }
    }

    /// Returns the item at `place`.
    pub(super) fn at(&self, place: u32) -> u32 {
        self.things[place as usize]
    }

    /// Returns the items in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.things.iter().copied()
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_read_strictly() {
        let mode = |races, shuffle| Ok(Mode { races, shuffle });
        assert_eq!(Mode::parse(None, None), mode(false, None));
        assert_eq!(Mode::parse(Some("1"), Some("7")), mode(true, Some(7)));
        assert_eq!(Mode::parse(Some("0"), None), mode(false, None));
        assert_eq!(Mode::parse(Some("yes"), None).unwrap_err(), "`yes` in STEPSCOPE_RACES");
        assert_eq!(Mode::parse(None, Some("-1")).unwrap_err(), "`-1` in STEPSCOPE_SHUFFLE");
    }

    #[test]
    fn a_scope_ends_with_its_code() {
        let (outer, inner) = (Mode { races: true, shuffle: None }, Mode { races: false, shuffle: Some(1) });
        outer.scope(|| {
            assert_eq!(Mode::current(), outer);
            let panicked = std::panic::catch_unwind(|| inner.scope(|| assert_eq!(Mode::current(), outer)));
            assert!(panicked.is_err());
            assert_eq!(Mode::current(), outer);
        });
    }

    #[test]
    fn seeds_select_block_orders() {
        let drawn = |seed, stream| {
            let mut order = Order::new(100, seed, stream);
            let first = order.iter().collect::<Vec<_>>();
            order.draw();
            (first, order.iter().collect::<Vec<_>>())
        };
        let (first, second) = drawn(1, 3);
        assert_eq!((first.clone(), second.clone()), drawn(1, 3));
        assert_ne!(first, second);
        assert_ne!(first, drawn(1, 4).0);
        assert_ne!(first, drawn(2, 3).0);
        for mut order in [first, second] {
            order.sort_unstable();
            assert!(order.into_iter().eq(0..100));
        }
    }
}
