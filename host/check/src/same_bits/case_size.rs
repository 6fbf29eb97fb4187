//! The two sizes of a case.

/// The size of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaseSize {
    /// The whole case.
    Whole,
    /// The smallest case, which takes each path of the kernel once.
    Smallest,
}

impl CaseSize {
    /// Both sizes.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Smallest];
}
