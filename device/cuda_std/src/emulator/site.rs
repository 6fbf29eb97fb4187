//! Source lines as small numbers, so that a cell of shadow memory can remember one.
//!
//! Invariant: a number names the same line for the life of the process.

use std::panic::Location;
use std::sync::{Mutex, PoisonError};

/// A source line that touches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Site(u16);

static LOCATIONS: Mutex<Vec<&'static Location<'static>>> = Mutex::new(Vec::new());

impl Site {
    fn of(location: &'static Location<'static>) -> Self {
        let mut locations = LOCATIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = locations.iter().position(|&known| core::ptr::eq(known, location));
        let number = known.unwrap_or_else(|| {
            locations.push(location);
            locations.len() - 1
        });
        Self(u16::try_from(number).expect("at most 65,536 lines of kernels touch memory"))
    }

    /// The line.
    pub(super) fn location(self) -> &'static Location<'static> {
        LOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(self.0)]
    }
}

/// The sites that a block met last. It finds them without a lock.
pub(super) struct Sites {
    recent: [Option<(&'static Location<'static>, Site)>; Self::RECENT],
}

impl Sites {
    const RECENT: usize = 64;

    pub(super) fn new() -> Self {
        Self { recent: [None; Self::RECENT] }
    }

    /// The number of a line.
    #[inline]
    pub(super) fn of(&mut self, location: &'static Location<'static>) -> Site {
        let place = core::ptr::from_ref(location) as usize / size_of::<Location<'_>>() % Self::RECENT;
        match self.recent[place] {
            Some((known, site)) if core::ptr::eq(known, location) => site,
            _ => {
                let site = Site::of(location);
                self.recent[place] = Some((location, site));
                site
            }
        }
    }
}
