//! Source lines as small numbers, so that a shadow cell can store one.
//!
//! Invariant: a number refers to the same line for the life of the process.

use std::panic::Location;
use std::sync::{Mutex, PoisonError};

/// A source line that accesses memory.
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

    /// Returns the line.
    pub(super) fn location(self) -> &'static Location<'static> {
        LOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(self.0)]
    }
}

/// A cache of the sites that a block used last, which needs no lock.
pub(super) struct Sites {
    recent: [Option<(&'static Location<'static>, Site)>; Self::RECENT],
}

impl Sites {
    const RECENT: usize = 64;

    pub(super) fn new() -> Self {
        Self { recent: [None; Self::RECENT] }
    }

    /// Returns the number of a line.
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
