//! How launches run: watched for races or not, in the usual order or in a shuffled one.
//!
//! Invariant: a kernel without races gives the same bits in every mode. A shuffled launch runs one block at a time. So a seed names
//! one order of everything, and a fault that it shows can be shown again.

use std::cell::Cell;
use std::env;
use std::sync::LazyLock;

/// `1`: watch every launch for races.
const RACES_VARIABLE: &str = "STEPSCOPE_RACES";
/// A seed: run blocks and threads in an order drawn from this seed.
const SHUFFLE_VARIABLE: &str = "STEPSCOPE_SHUFFLE";

static ENVIRONMENT: LazyLock<Result<Mode, String>> = LazyLock::new(|| {
    // No value that has a meaning holds a replacement character.
    let value = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    Mode::parse(value(RACES_VARIABLE).as_deref(), value(SHUFFLE_VARIABLE).as_deref())
});

thread_local! {
    static SCOPE: Cell<Option<Mode>> = const { Cell::new(None) };
}

/// How the emulator runs a kernel, and what it watches meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode {
    /// Whether races, reads of unwritten shared memory and accesses outside an argument are faults.
    pub races: bool,
    /// The seed of a shuffled order of blocks and threads. None: blocks run in parallel, threads ascend.
    pub shuffle: Option<u64>,
}

impl Mode {
    /// Watched for races, in the usual order.
    pub const RACES: Self = Self { races: true, shuffle: None };

    /// What `STEPSCOPE_RACES` (0 or 1) and `STEPSCOPE_SHUFFLE` (a seed) ask for. Both are read once, at the first call.
    ///
    /// # Errors
    /// The value that has no meaning, and its variable.
    pub fn from_environment() -> Result<Self, String> {
        ENVIRONMENT.clone()
    }

    /// Runs `code`. Launches that this OS thread makes meanwhile run in this mode, whatever the environment says.
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

    /// The mode of the [`Mode::scope`] in which this OS thread is: for code that launches on another OS thread in its place.
    pub fn of_thread() -> Option<Self> {
        SCOPE.get()
    }

    /// The mode of a launch that this OS thread makes now.
    ///
    /// # Panics
    /// When the environment's variables have no meaning. Code that opens a device looks at them first.
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

/// A random order of things that may come in any order.
#[derive(Debug)]
pub(super) struct Order {
    things: Vec<u32>,
    /// The state of SplitMix64 (Steele, Lea and Flood, 2014).
    random: u64,
}

impl Order {
    /// An order of `0..count` that follows from `seed`, another one for each `stream`.
    pub(super) fn new(count: u32, seed: u64, stream: u64) -> Self {
        let random = seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        let mut order = Self { things: (0..count).collect(), random };
        order.draw();
        order
    }

    /// Draws another order.
    pub(super) fn draw(&mut self) {
        for end in (1..self.things.len()).rev() {
            let place = (u128::from(split_mix(&mut self.random)) * (end as u128 + 1)) >> 64;
            self.things.swap(end, place as usize);
        }
    }

    /// Which thing comes at `place`.
    pub(super) fn at(&self, place: u32) -> u32 {
        self.things[place as usize]
    }

    /// The things in order.
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
    fn orders_are_permutations_that_their_seed_names() {
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
