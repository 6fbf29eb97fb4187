//! Counts the pages of this process that the system has backed with memory. An anonymous mapping
//! takes no memory before it is touched.
//!
//! Invariant: a figure that the system does not report is an error, never a guess.

#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use std::fs::File;
use std::io::{Error, Result};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The bits of a page's word in `/proc/self/pagemap`, as the kernel documents them: in memory, or
/// swapped out.
const BACKED: u64 = 1 << 63 | 1 << 62;
/// The number of words read at a time.
const AT_ONCE: usize = 1 << 16;

/// Returns the bytes of these mappings that have no memory yet. The mappings start on page
/// boundaries.
///
/// # Errors
/// Errors of reading `/proc/self/pagemap`, which exists on Linux.
pub(super) fn unbacked_bytes(mappings: impl IntoIterator<Item = Range<u64>>) -> Result<u64> {
    // SAFETY: `sysconf` only reads a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = u64::try_from(page).map_err(Error::other)?;
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut words = vec![0; AT_ONCE * size_of::<u64>()];
    let mut unbacked = 0;
    for mapping in mappings {
        let (mut next, end) = (mapping.start / page, mapping.end.div_ceil(page));
        while next < end {
            let words = &mut words[..size_of::<u64>() * AT_ONCE.min((end - next) as usize)];
            pagemap.read_exact_at(words, next * size_of::<u64>() as u64)?;
            let is_backed = |word: &&[u8; 8]| u64::from_ne_bytes(**word) & BACKED != 0;
            let words = words.as_chunks().0;
            let backed = words.iter().filter(is_backed).count();
            unbacked += (words.len() - backed) as u64 * page;
            next += words.len() as u64;
        }
    }
    Ok(unbacked)
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use memmap2::MmapMut;

    #[test]
    fn touched_pages_are_backed() {
        // More than is read at once, with pages of 4 KiB.
        let mut mapping = MmapMut::map_anon(300 << 20).unwrap();
        let start = mapping.as_ptr() as u64;
        let all = start..start + mapping.len() as u64;
        assert_eq!(unbacked_bytes([all.clone()]).unwrap(), 300 << 20);
        mapping[..7 << 20].fill(1);
        mapping[299 << 20..].fill(1);
        // The system may back more than was touched, in large pages.
        let unbacked = unbacked_bytes([all.clone()]).unwrap();
        assert!((288 << 20..=292 << 20).contains(&unbacked), "{unbacked}");
        assert_eq!(unbacked_bytes([start..start + (7 << 20), all.end - (1 << 20)..all.end]).unwrap(), 0);
        assert_eq!(unbacked_bytes([]).unwrap(), 0);
    }
}
