//! The resources that the system may not provide, and the errors that it gives.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::Arc;

/// A resource of the system, as [`Error::System`](crate::Error::System) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resource {
    /// A thread of this process.
    Thread,
    /// A port of this host to listen at.
    Port,
    /// Unpredictable bytes.
    RandomNumbers,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thread => "thread",
            Self::Port => "free port",
            Self::RandomNumbers => "random numbers",
        })
    }
}

impl Resource {
    /// The action to take.
    pub(super) fn advice(self) -> &'static str {
        match self {
            Self::Thread => "end other programs of this user, or raise its limit of processes (`ulimit -u`)",
            Self::Port => "end programs that hold many connections, or let this program open sockets",
            Self::RandomNumbers => "let this program call `getrandom` or read /dev/urandom",
        }
    }
}

/// An error of the system. Two are equal if they have the same kind and text.
#[derive(Clone, Debug)]
pub struct SystemError(Arc<io::Error>);

impl SystemError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> io::ErrorKind {
        self.0.kind()
    }
}

impl From<io::Error> for SystemError {
    fn from(error: io::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for SystemError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl PartialEq for SystemError {
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind() && self.to_string() == other.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::error::Error as _;

    #[test]
    fn system_errors_name_resource_and_source() {
        let refused = || io::Error::new(io::ErrorKind::WouldBlock, "no more threads");
        let error = Error::system("device", Resource::Thread, refused());
        assert_eq!(
            error.to_string(),
            "device: the system provided no thread: no more threads; end other programs of this user, or raise its limit of processes \
             (`ulimit -u`)"
        );
        assert_eq!(error.source().expect("a source").to_string(), "no more threads");
        assert_eq!(error, Error::system("device", Resource::Thread, refused()));
        assert_ne!(error, Error::system("device", Resource::Thread, io::Error::other("no more threads")));
        assert_ne!(error, Error::system("device", Resource::Port, refused()));
    }
}
