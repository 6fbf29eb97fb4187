//! Files: read as they were when they were opened, replaced as a whole, and recognized by their
//! first bytes.
//!
//! Every path that a user supplies is opened here.

mod kind;
mod plain;
mod replace;

pub use kind::{FileKind, MAX_HEADER_BYTES};
pub use plain::{PlainFile, is_at, open_without_links};
pub use replace::{Replacement, remove_file, replace_file, replace_file_by, sweep};
