//! The two forms of a case.

/// How much of a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// All of it.
    Whole,
    /// What takes each path of the kernel once.
    Smallest,
}

impl Form {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Smallest];
}
