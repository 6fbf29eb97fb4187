//! The location of a head's rows, the attention mask, and the size checks of the contracts.
//!
//! ```text
//! packed   token: | q0 | q1 | q2 | q3 | k0 | k1 | v0 | v1 |    heads = 4, kv_heads = 2
//!          stride: the whole row
//! stacked  q, token: | q0 | q1 |  then k, token: | k0 | k1 |  then v
//!          stride: heads width
//! ```

use crate::block::{divide, divide_short};
use crate::qkv_layout::QkvLayout;
use crate::vector::load;
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::launch::{Size, Violation};
use cuda_std::thread;

/// The inputs of an attention kernel.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'k, S> {
    pub(crate) qkv: &'k [S],
    pub(crate) documents: &'k [u32],
    pub(crate) lengths: &'k [u32],
    pub(crate) tokens: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) width: u32,
    pub(crate) stacked: u32,
    pub(crate) window: u32,
    pub(crate) scale: f32,
}

/// The rows of one head, by token.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'k, S> {
    pub(crate) values: &'k [S],
    /// The index of token 0's first column, and the distance in elements from one token to the
    /// next.
    pub(crate) start: usize,
    pub(crate) stride: usize,
}

impl<'k, S: Copy> Problem<'k, S> {
    /// The masks are the documents and the lengths.
    #[inline(always)]
    pub(crate) fn new(
        qkv: &'k [S],
        [documents, lengths]: [&'k [u32]; 2],
        layout: QkvLayout,
        window: u32,
        scale: f32,
    ) -> Self {
        let QkvLayout { tokens, heads, kv_heads, width, stacked } = layout;
        Self { qkv, documents, lengths, tokens, heads, kv_heads, width, stacked, window, scale }
    }

    /// The distance in elements from one token to the next in `qkv`.
    #[inline(always)]
    fn stride(&self) -> usize {
        let heads = if self.stacked == 0 { self.heads + 2 * self.kv_heads } else { self.heads };
        heads as usize * self.width as usize
    }

    /// Returns the rows of a head of q (`part` 0), k (1) or v (2).
    #[inline(always)]
    pub(crate) fn rows(&self, part: u32, sample: usize, head: u32) -> Rows<'k, S> {
        let (stride, width) = (self.stride(), self.width as usize);
        let start = match part {
            0 => 0,
            part if self.stacked != 0 => part as usize * (self.qkv.len() / 3),
            1 => self.heads as usize * width,
            _ => (self.heads + self.kv_heads) as usize * width,
        };
        let start = start + sample * self.tokens as usize * stride + head as usize * width;
        Rows { values: self.qkv, start, stride }
    }

    /// Returns the rows of a query head in an array with the shape of the output.
    #[inline(always)]
    pub(crate) fn output_rows<'v>(&self, values: &'v [S], sample: usize, head: u32) -> Rows<'v, S> {
        let (stride, width) = (self.heads as usize * self.width as usize, self.width as usize);
        Rows { values, start: sample * self.tokens as usize * stride + head as usize * width, stride }
    }

    /// Returns the index in `lse` and `delta` of a query head's first token.
    #[inline(always)]
    pub(crate) fn statistics(&self, sample: usize, head: u32) -> usize {
        (sample * self.heads as usize + head as usize) * self.tokens as usize
    }

    /// The number of query heads of a key head.
    #[inline(always)]
    pub(crate) fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }
}

/// A block's resident rows: rows of one head of one sample.
#[derive(Clone, Copy)]
pub(crate) struct ResidentRows<'k> {
    pub(crate) sample: usize,
    pub(crate) head: u32,
    /// The first row.
    pub(crate) first: u32,
    /// The attention mask of this sample.
    pub(crate) mask: MaskRange<'k>,
}

/// The heads whose blocks take turns in [`ResidentRows::in_part`].
const HEADS_AT_ONCE: u32 = 8;

impl<'k> ResidentRows<'k> {
    /// Returns this block's place, for blocks with `rows` resident rows of each of `heads` heads.
    /// If `backwards`, the last rows come first, because they have the most work under a causal
    /// mask.
    ///
    /// # Safety
    /// The contract has accepted the problem, and `heads` is one of its numbers of heads.
    #[inline(always)]
    pub(crate) unsafe fn new<S: Copy>(problem: &Problem<'k, S>, rows: u32, heads: u32, backwards: bool) -> Self {
        let tiles = problem.tokens.div_ceil(rows);
        // SAFETY: the contract has checked that there are tokens and heads.
        let ((number, tile), heads) =
            unsafe { (divide(thread::block_idx_x() as usize, tiles as usize), heads as usize) };
        // SAFETY: the contract has checked that there are heads.
        let (sample, head) = unsafe { divide(number, heads) };
        let tile = if backwards { tiles - 1 - tile as u32 } else { tile as u32 };
        // SAFETY: the sample and the head exist.
        unsafe { Self::of(problem, sample, head as u32, tile * rows) }
    }

    /// Returns this block's place in a launch that begins at head `before` of all samples' heads.
    /// All first rows of eight heads come before their next ones, and so do those of the last
    /// `last_heads` heads or more, so that the launch ends with short blocks. The parameters are
    /// otherwise as in [`ResidentRows::new`]. Most numbers have 32 bits, which take fewer
    /// registers.
    ///
    /// # Safety
    /// The caller meets the requirements of [`ResidentRows::new`]. The launch has all blocks of its
    /// heads.
    #[inline(always)]
    pub(crate) unsafe fn in_part<S: Copy>(
        problem: &Problem<'k, S>,
        rows: u32,
        heads: u32,
        before: usize,
        last_heads: u32,
        backwards: bool,
    ) -> Self {
        let tiles = problem.tokens.div_ceil(rows);
        // SAFETY: the contract has checked that there are tokens and heads. A group of heads has at
        // least the head of this block.
        unsafe {
            let all = divide_short(thread::grid_dim_x(), tiles).0;
            let last = if all < last_heads { 0 } else { (all - last_heads) / HEADS_AT_ONCE };
            let group = divide_short(thread::block_idx_x(), tiles * HEADS_AT_ONCE).0;
            let group = if group < last { group } else { last };
            let start = group * HEADS_AT_ONCE;
            let at_once = if group < last { HEADS_AT_ONCE } else { all - start };
            let (tile, head) = divide_short(thread::block_idx_x() - start * tiles, at_once);
            let (sample, head) = divide_short(before as u32 + start + head, heads);
            let tile = if backwards { tiles - 1 - tile } else { tile };
            Self::of(problem, sample as usize, head, tile * rows)
        }
    }

    /// Returns the place of rows of a head, from token `first` on.
    ///
    /// # Safety
    /// The contract has accepted the problem, and the sample exists.
    #[inline(always)]
    pub(crate) unsafe fn of<S: Copy>(problem: &Problem<'k, S>, sample: usize, head: u32, first: u32) -> Self {
        let length = if problem.lengths.is_empty() {
            problem.tokens
        } else {
            // SAFETY: `lengths` has an element for each sample.
            let length = unsafe { load(problem.lengths, sample) };
            if length < problem.tokens { length } else { problem.tokens }
        };
        let mask = MaskRange {
            documents: problem.documents,
            start: sample * problem.tokens as usize,
            length,
            window: problem.window,
        };
        Self { sample, head, first, mask }
    }
}

/// The attention mask of a sample: which keys a query sees.
#[derive(Clone, Copy)]
pub(crate) struct MaskRange<'k> {
    documents: &'k [u32],
    /// The index in `documents` of the sample's first token.
    start: usize,
    /// The number of tokens that exist.
    pub(crate) length: u32,
    window: u32,
}

impl MaskRange<'_> {
    /// True if query `i` sees key `j`, ignoring documents.
    #[inline(always)]
    pub(crate) fn sees(self, i: u32, j: u32) -> bool {
        i < self.length && j < self.length && (self.window == 0 || (j <= i && i - j < self.window))
    }

    /// Returns the range of keys that query `i` sees, ignoring documents.
    #[inline(always)]
    pub(crate) fn keys_seen(self, i: u32) -> [u32; 2] {
        if i >= self.length {
            [0, 0]
        } else if self.window == 0 {
            [0, self.length]
        } else {
            [(i + 1).saturating_sub(self.window), i + 1]
        }
    }

    /// Returns the range of queries that see key `j`, ignoring documents.
    #[inline(always)]
    pub(crate) fn queries_seeing(self, j: u32) -> [u32; 2] {
        if j >= self.length {
            [0, 0]
        } else if self.window == 0 {
            [0, self.length]
        } else {
            let end = j.saturating_add(self.window);
            [j, if end < self.length { end } else { self.length }]
        }
    }

    /// True if there is a document mask.
    #[inline(always)]
    pub(crate) fn has_documents(self) -> bool {
        !self.documents.is_empty()
    }

    /// Returns the document of a token. Returns 0 for a token that does not exist, and if there is
    /// no document mask.
    #[inline(always)]
    pub(crate) fn document(self, token: u32) -> u32 {
        if self.documents.is_empty() || token >= self.length {
            return 0;
        }
        // SAFETY: the sample has an element for each token.
        unsafe { load(self.documents, self.start + token as usize) }
    }

    /// True if each of `queries` rows from `i` sees each of `keys` rows from `j`.
    #[inline(always)]
    pub(crate) fn all_seen(self, [i, queries]: [u32; 2], [j, keys]: [u32; 2]) -> bool {
        let in_window = self.window == 0 || (j + keys - 1 <= i && i + queries - 1 - j < self.window);
        self.documents.is_empty() && i + queries <= self.length && j + keys <= self.length && in_window
    }

    /// True if none of `queries` rows from `i` sees any of `keys` rows from `j`, ignoring
    /// documents.
    #[inline(always)]
    pub(crate) fn none_seen(self, [i, queries]: [u32; 2], [j, keys]: [u32; 2]) -> bool {
        let outside = self.window != 0 && (j >= i + queries || i >= (j + keys - 1).saturating_add(self.window));
        outside || i >= self.length || j >= self.length
    }

    /// Returns the range of key tiles of `tile` rows that any of `rows` queries from `first` sees.
    #[inline(always)]
    pub(crate) fn keys_of(self, first: u32, rows: u32, tile: u32) -> [u32; 2] {
        if first >= self.length {
            return [0, 0];
        }
        if self.window == 0 {
            return [0, self.length.div_ceil(tile)];
        }
        let end = if first + rows < self.length { first + rows } else { self.length };
        let from = if first < self.window { 0 } else { first - (self.window - 1) };
        [from / tile, end.div_ceil(tile)]
    }

    /// Returns the range of query tiles of `tile` rows that see any of `rows` keys from `first`.
    #[inline(always)]
    pub(crate) fn queries_of(self, first: u32, rows: u32, tile: u32) -> [u32; 2] {
        if first >= self.length {
            return [0, 0];
        }
        if self.window == 0 {
            return [0, self.length.div_ceil(tile)];
        }
        // The last key is seen by its own query and the `window - 1` after it.
        let last = first + rows - 1;
        let end = if self.window < self.length && last < self.length - self.window {
            last + self.window
        } else {
            self.length
        };
        [first / tile, end.div_ceil(tile)]
    }
}

/// The checked sizes of a launch.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) samples: usize,
    tokens: u32,
    heads: u32,
    width: u32,
}

/// Returns the [`Sizes`] of a launch, whose widths are `$widths`. Checks `qkv` and the masks.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check_sizes {
    ($p:ident, $widths:expr) => {{
        let numbers = $p.layout;
        let sizes = $crate::flash_attention::place::Sizes::new($p.qkv.len(), numbers, $widths)?;
        sizes.check_masks($p.documents.len(), $p.lengths.len())?;
        sizes
    }};
}
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use check_sizes;

/// Returns the [`Sizes`] of a backward launch on tensor cores, and checks its inputs.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! check_backward {
    ($p:ident, $widths:expr) => {{
        let sizes = $crate::flash_attention::place::check_sizes!($p, $widths);
        Violation::unless($p.scale > 0.0, "scale", "above 0", $p.scale)?;
        sizes.check_gradients($p.layout.heads, [$p.lse.len(), $p.delta.len(), $p.dout.len()])?;
        sizes
    }};
}
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use check_backward;

#[cfg(not(target_arch = "nvptx64"))]
impl Sizes {
    /// Returns the sizes of a `qkv` with `length` elements, or the violation. Widths are multiples
    /// of `step`, up to `widest`.
    pub(crate) fn new(length: usize, layout: QkvLayout, (step, widest): (u32, usize)) -> Result<Self, Violation> {
        let QkvLayout { tokens, heads, kv_heads, width, .. } = layout;
        // A block also numbers the rows of a tile past the last token.
        Violation::unless((1..1 << 31).contains(&tokens), "tokens", "1 to 2^31 - 1", tokens)?;
        let all_heads = layout.check(step as usize, widest)?;
        Violation::unless(heads.is_multiple_of(kv_heads), "kv_heads", "a divisor of `heads`", kv_heads)?;
        let samples = crate::warp::rows_in("qkv", length, all_heads.times(width).times(tokens))?;
        Ok(Self { samples, tokens, heads, width })
    }

    /// The elements of an array with one element for each token of `heads` heads.
    pub(crate) fn rows(self, heads: u32) -> Size {
        Size::of(self.samples).times(self.tokens).times(heads)
    }

    /// The elements of the output.
    pub(crate) fn outputs(self) -> Size {
        self.rows(self.heads).times(self.width)
    }

    /// Checks that each mask has an element for every token or sample, or is empty.
    pub(crate) fn check_masks(self, documents: usize, lengths: usize) -> Result<(), Violation> {
        if documents > 0 {
            Violation::unless_length("documents", self.rows(1), documents)?;
        }
        if lengths > 0 { Violation::unless_length("lengths", self.samples, lengths) } else { Ok(()) }
    }

    /// Checks the lengths of a backward kernel's inputs other than `qkv`.
    pub(crate) fn check_gradients(self, heads: u32, [lse, delta, dout]: [usize; 3]) -> Result<(), Violation> {
        Violation::unless_length("lse", self.rows(heads), lse)?;
        Violation::unless_length("delta", self.rows(heads), delta)?;
        Violation::unless_length("dout", self.outputs(), dout)
    }

    /// Checks that a part of all samples' key heads, from a first on, has some and lies inside
    /// them. Returns its number of query heads.
    pub(crate) fn check_part(self, kv_heads: u32, [before, count]: [u32; 2]) -> Result<Size, Violation> {
        Violation::unless(count > 0, "count", "at least 1", count)?;
        let all = Size::of(self.samples).times(kv_heads);
        let inside = all.number().is_some_and(|all| before as usize + count as usize <= all);
        Violation::unless(inside, "before", "at most the number of key heads less `count`", before)?;
        Ok(Size::of(count).times(self.heads / kv_heads))
    }

    /// Returns the number of blocks: one for each tile of `rows` rows of each of `heads` heads.
    pub(crate) fn blocks(self, heads: u32, rows: u32) -> Size {
        Size::of(self.samples).times(heads).times(Size::of(self.tokens).div_ceil(rows))
    }
}
