//! What each element of memory remembers: who wrote it last, and who has read it since.
//!
//! The rules are FastTrack's (Flanagan and Freund, 2009): every write must follow the write before it and all reads since,
//! every read the last write. An access that follows another replaces it, for whatever follows the later one follows both.
//! Invariant: a cell that reports nothing holds all that is needed to judge the next access. It keeps two readers where
//! there are many: they are chosen so that no thread can come to follow both while it does not follow all.
//!
//! One simplification: lanes of a warp that read an element at different times, with partial warp barriers between them,
//! are taken to have read it at the last of these times.

use super::clock::{Now, Stamp};
use super::fault::Kind;

/// An earlier access that the one that happens now does not follow.
pub(super) type Conflict = (Kind, Stamp);

/// The memory of one element.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cell {
    write: Option<Stamp>,
    readers: Readers,
}

/// Who has read an element since it was written.
#[derive(Clone, Copy, Debug, Default)]
enum Readers {
    #[default]
    None,
    /// Lanes of one warp, at one time.
    Warp { first: Stamp, lanes: u32 },
    /// Threads of several warps, or of several blocks if there are several; two of them.
    Many { first: Stamp, other: Stamp },
}

impl Cell {
    /// Whether anything was written here.
    #[inline]
    pub(super) fn is_written(&self) -> bool {
        self.write.is_some()
    }

    /// Notes an access.
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

    /// These readers and one of another warp or time.
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
            // A barrier orders threads of one block; a reader of another block is the one that nothing orders.
            Self::Many { first, other } if first.block == other.block && stamp.block != first.block => {
                Self::Many { first, other: stamp }
            }
            many @ Self::Many { .. } => many,
        }
    }

    /// A reader that the access does not follow.
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

/// The lanes of a mask, ascending.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < u32::BITS).then_some(lane)
    })
}
