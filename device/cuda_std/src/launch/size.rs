//! The arithmetic of contracts.
//!
//! Invariant: a [`Size`] is the exact result of what it was computed from, or it is no number at all. So a contract that compares
//! it with a length is right for arguments of any size, with overflow checks and without.

use core::fmt;

/// A number of elements, of rows or of blocks that a contract computes. What does not fit a word, or divides by zero, stays
/// overflowed whatever follows: it equals no length and fits no limit, so the contract refuses.
///
/// ```
/// use cuda_std::launch::Size;
/// assert!(Size::of(6).times(7).is(42));
/// assert!(!Size::of((1_usize << 61) + 1).times(8).is(8));
/// assert!(!Size::of(usize::MAX).times(2).times(0).at_most(usize::MAX));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Size(Option<usize>);

impl Size {
    /// A number as it is.
    pub fn of(number: impl Into<Self>) -> Self {
        number.into()
    }

    /// The product.
    #[must_use]
    pub fn times(self, factor: impl Into<Self>) -> Self {
        self.with(factor, usize::checked_mul)
    }

    /// The sum.
    #[must_use]
    pub fn plus(self, other: impl Into<Self>) -> Self {
        self.with(other, usize::checked_add)
    }

    /// The difference.
    #[must_use]
    pub fn less(self, other: impl Into<Self>) -> Self {
        self.with(other, usize::checked_sub)
    }

    /// The quotient, rounded up: how many chunks of `divisor` cover it.
    #[must_use]
    pub fn div_ceil(self, divisor: impl Into<Self>) -> Self {
        self.with(divisor, |number, divisor| (divisor > 0).then(|| number.div_ceil(divisor)))
    }

    /// Whether it is this length.
    pub fn is(self, length: usize) -> bool {
        self.0 == Some(length)
    }

    /// Whether it is no more than this.
    pub fn at_most(self, limit: usize) -> bool {
        self.0.is_some_and(|number| number <= limit)
    }

    /// The number, if it is one.
    pub fn number(self) -> Option<usize> {
        self.0
    }

    fn with(self, other: impl Into<Self>, compute: impl FnOnce(usize, usize) -> Option<usize>) -> Self {
        Self(self.0.zip(other.into().0).and_then(|(a, b)| compute(a, b)))
    }
}

impl From<usize> for Size {
    fn from(number: usize) -> Self {
        Self(Some(number))
    }
}

impl From<u32> for Size {
    fn from(number: u32) -> Self {
        Self(usize::try_from(number).ok())
    }
}

/// What a literal is; a negative number is no size.
impl From<i32> for Size {
    fn from(number: i32) -> Self {
        Self(usize::try_from(number).ok())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => fmt::Display::fmt(&number, f),
            None => f.write_str("uncountably many"),
        }
    }
}
