//! The arithmetic of contracts.
//!
//! Invariant: a [`Size`] is either the exact result of its computation, or overflowed. A contract
//! that compares it with a length is therefore correct for arguments of any size, with and without
//! overflow checks.

use core::fmt;

/// A number of elements, rows or blocks that a contract computes. A result that does not fit a
/// word, or a division by zero, makes it overflowed for good. An overflowed size equals no length
/// and fits no limit, so the contract rejects it.
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
    /// Returns a number as a size.
    pub fn of(number: impl Into<Self>) -> Self {
        number.into()
    }

    /// Returns the product.
    #[must_use]
    pub fn times(self, factor: impl Into<Self>) -> Self {
        self.with(factor, usize::checked_mul)
    }

    /// Returns the sum.
    #[must_use]
    pub fn plus(self, other: impl Into<Self>) -> Self {
        self.with(other, usize::checked_add)
    }

    /// Returns the difference.
    #[must_use]
    pub fn less(self, other: impl Into<Self>) -> Self {
        self.with(other, usize::checked_sub)
    }

    /// Returns the quotient, rounded up: the number of chunks of `divisor` that cover it.
    #[must_use]
    pub fn div_ceil(self, divisor: impl Into<Self>) -> Self {
        self.with(divisor, |number, divisor| (divisor > 0).then(|| number.div_ceil(divisor)))
    }

    /// True if it equals `length`.
    pub fn is(self, length: usize) -> bool {
        self.0 == Some(length)
    }

    /// True if it is at most `limit`.
    pub fn at_most(self, limit: usize) -> bool {
        self.0.is_some_and(|number| number <= limit)
    }

    /// Returns the number, unless it overflowed.
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

/// The conversion of a literal. A negative number counts as an overflow.
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
