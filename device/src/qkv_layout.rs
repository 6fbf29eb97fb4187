//! The layout of q, k and v in one tensor, as launches pass it.

#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{Pod, Size, Violation, Zeroable};

/// The extents of q, k and v: `[samples, tokens, (heads + 2 kv_heads) width]` if `stacked` is 0,
/// else `[3, samples, tokens, heads width]`.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(Pod, Zeroable))]
#[repr(C)]
pub struct QkvLayout {
    /// Tokens of a sample.
    pub tokens: u32,
    /// Heads of q.
    pub heads: u32,
    /// Heads of k, and of v.
    pub kv_heads: u32,
    /// Columns of a head.
    pub width: u32,
    /// 0 if q, k and v of a token are next to each other.
    pub stacked: u32,
}

#[cfg(not(target_arch = "nvptx64"))]
impl QkvLayout {
    /// Returns the number of heads of q, k and v, below 2^32, or the violation. Heads have at least
    /// one column and up to `widest`, a multiple of `step`.
    pub fn check(self, step: usize, widest: usize) -> Result<Size, Violation> {
        let Self { heads, kv_heads, width, stacked, .. } = self;
        Violation::unless(heads > 0, "heads", "at least 1", heads)?;
        let suits = kv_heads > 0 && (stacked == 0 || kv_heads == heads);
        Violation::unless(suits, "kv_heads", "at least 1; `heads` if q, k and v are stacked", kv_heads)?;
        Violation::unless_aligned("width", width, step)?;
        let suits = width > 0 && width as usize <= widest;
        Violation::unless(suits, "width", "at least 1, up to that of the kernel", width)?;
        let all = Size::of(kv_heads).times(2).plus(heads);
        // Kernels add numbers of heads in 32 bits.
        Violation::unless(all.at_most(u32::MAX as usize), "heads", "fewer than 2^32 heads in all", heads)?;
        Ok(all)
    }
}
