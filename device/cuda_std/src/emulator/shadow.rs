//! The shadow memory of each element: its last writer, and its readers since.
//!
//! The rules are FastTrack's (Flanagan and Freund, 2009). A write must follow the previous write
//! and all reads since. A read must follow the last write. An access that follows another replaces
//! it, because everything that follows the later one follows both.
//!
//! ```text
//! readers of a cell   a read that follows all of them   a read that does not
//! None                Warp: only it
//! Warp: of one warp   Warp: only it                     same warp: Warp, it too
//!                                                       another warp: Many, one of the old and it
//! Many: two of them   Warp: only it                     Many, the same two; but the first of
//!                                                       another block replaces one
//! a write must follow all readers, and leaves None
//! ```
//! Invariant: a cell that reports nothing holds all the state that it needs to check the next
//! access. If there are many readers it keeps two. They are chosen so that no thread can follow
//! both without following all.
//!
//! One simplification: lanes of a warp may read an element at different times, with partial warp
//! barriers between them. They are treated as having read it at the last of these times.

use super::clock::{Now, Stamp};
use super::fault::Kind;

/// An earlier access that the present one does not follow.
pub(super) type Conflict = (Kind, Stamp);

/// The shadow cell of one element.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cell {
    write: Option<Stamp>,
    readers: Readers,
}

/// The readers of an element since it was written.
#[derive(Clone, Copy, Debug, Default)]
enum Readers {
    #[default]
    None,
    /// Lanes of one warp, which are treated as reading at one time.
    Warp { first: Stamp, lanes: u32 },
    /// Threads of several warps. Two readers are kept, from two blocks if the readers are from
    /// several blocks.
    Many { first: Stamp, other: Stamp },
}

impl Cell {
    /// True if anything was written here.
    #[inline]
    pub(super) fn is_written(&self) -> bool {
        self.write.is_some()
    }

    /// Records an access.
    #[inline]
    pub(super) fn touch(&mut self, kind: Kind, now: &Now<'_>) -> Result<(), Conflict> {
        match self.write {
            Some(write) if !now.follows(write) => return Err((Kind::Write, write)),
            _ => {}
        }
        match kind {
            Kind::Read => self.readers.add(now),
            Kind::Write => {
                if let Some(reader) = self.readers.not_followed(now) {
                    return Err((Kind::Read, reader));
                }
                *self = Self { write: Some(now.stamp), readers: Readers::None };
            }
        }
        Ok(())
    }
}

impl Readers {
    #[inline]
    fn add(&mut self, now: &Now<'_>) {
        match self {
            Self::Warp { first, lanes } if first.same_moment(now.stamp) => *lanes |= 1 << now.stamp.lane(),
            _ => *self = self.and(now),
        }
    }

    /// Returns these readers with one more, of another warp or another time.
    fn and(self, now: &Now<'_>) -> Self {
        let stamp = now.stamp;
        let alone = Self::Warp { first: stamp, lanes: 1 << stamp.lane() };
        match self {
            Self::None => alone,
            Self::Warp { first, lanes } => {
                let lanes = lanes_of(lanes).filter(|&lane| !now.follows(first.by_lane(lane)));
                let lanes = lanes.fold(0, |lanes, lane| lanes | 1u32 << lane);
                if lanes == 0 {
                    alone
                } else if first.same_warp(stamp) {
                    Self::Warp { first: stamp, lanes: lanes | 1 << stamp.lane() }
                } else {
                    Self::Many { first: first.by_lane(lanes.trailing_zeros()), other: stamp }
                }
            }
            Self::Many { first, other } if now.follows(first) && now.follows(other) => alone,
            // A barrier orders threads of one block. Nothing orders a reader of another block, so
            // that one is kept.
            Self::Many { first, other } if first.block == other.block && stamp.block != first.block => {
                Self::Many { first, other: stamp }
            }
            many @ Self::Many { .. } => many,
        }
    }

    /// Returns a reader that the access does not follow.
    #[inline]
    fn not_followed(self, now: &Now<'_>) -> Option<Stamp> {
        match self {
            Self::None => None,
            Self::Warp { first, lanes } => {
                lanes_of(lanes).map(|lane| first.by_lane(lane)).find(|&reader| !now.follows(reader))
            }
            Self::Many { first, other } => [first, other].into_iter().find(|&reader| !now.follows(reader)),
        }
    }
}

/// Returns the lanes of a mask, ascending.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < u32::BITS).then_some(lane)
    })
}
