//! The threads of a block and the least blocks of a multiprocessor, which PTX states as `.maxntid`
//! and `.minnctapersm`, and for which rustc has no word.
//!
//! Without it, ptxas gives each thread of a kernel the same registers and ignores `setmaxnreg`. A
//! kernel therefore leaves a comment by `asm!("// block_threads 384")`, and this module writes
//! `.maxntid 384, 1, 1` between the kernel's parameters and its body. After
//! `// block_threads 128 4` it also writes `.minnctapersm 4`, and ptxas gives a thread no more
//! registers than leave room for four such blocks. Without `.minnctapersm`, ptxas may ignore
//! `setmaxnreg` as well, because it does not know with how many registers a thread begins.
//! `cargo xtask ptx` checks that such kernels have both.
//!
//! The parameters of such a kernel that are tensor maps, 128 bytes each, get an alignment of 64
//! bytes, which rustc cannot state either.

/// The comment that a kernel leaves in its body.
const COMMENT: &str = "// block_threads ";

/// Returns the PTX with `.maxntid` for each kernel whose body has the comment. Other kernels do not
/// change, nor do kernels that have it.
pub(crate) fn with_block_threads(ptx: &str) -> String {
    let mut kernels = ptx.split(".entry ");
    let mut bounded = kernels.next().unwrap_or_default().to_owned();
    for kernel in kernels {
        bounded += ".entry ";
        match (kernel.split_once("\n{"), threads(kernel)) {
            (Some((head, body)), Some((threads, blocks))) if !head.contains(".maxntid") => {
                let head = with_aligned_maps(head);
                let blocks = blocks.map_or_else(String::new, |blocks| format!(".minnctapersm {blocks}\n"));
                bounded += &format!("{head}\n.maxntid {threads}, 1, 1\n{blocks}{{{body}");
            }
            _ => bounded += kernel,
        }
    }
    bounded
}

/// Returns the parameters of a kernel with tensor maps on 64 bytes.
fn with_aligned_maps(head: &str) -> String {
    let aligned = |line: &str| {
        if line.contains("[128]") { line.replace(".param .align 16 ", ".param .align 64 ") } else { line.to_owned() }
    };
    head.split('\n').map(aligned).collect::<Vec<_>>().join("\n")
}

/// Returns the threads in the comment of a kernel, and the blocks if it has them.
fn threads(kernel: &str) -> Option<(&str, Option<&str>)> {
    let (_, rest) = kernel.split_once(COMMENT)?;
    let mut numbers = rest.lines().next()?.split_whitespace();
    let is_number = |word: &&str| word.bytes().all(|byte| byte.is_ascii_digit());
    let threads = numbers.next().filter(is_number)?;
    Some((threads, numbers.next().filter(is_number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_commented_kernels_are_bounded() {
        let ptx = ".version 8.0\n.visible .entry plain(\n\t.param .u64 a\n)\n{\n\tret;\n}\n\n\
            .visible .entry bounded(\n\t.param .u64 a\n)\n{\n\t// block_threads 384\n\tret;\n}\n";
        let expected = ptx.replacen(")\n{\n\t// block", ")\n.maxntid 384, 1, 1\n{\n\t// block", 1);
        assert_eq!(with_block_threads(ptx), expected);
        assert_eq!(with_block_threads(&expected), expected);
        let with_blocks = ptx.replace("384", "128 4");
        let expected =
            with_blocks.replacen(")\n{\n\t// block", ")\n.maxntid 128, 1, 1\n.minnctapersm 4\n{\n\t// block", 1);
        assert_eq!(with_block_threads(&with_blocks), expected);
        assert_eq!(with_block_threads(&expected), expected);
        let with_map = ptx.replace(
            ".param .u64 a\n)\n{\n\t// block",
            ".param .align 16 .b8 a[128],\n\t.param .align 16 .b8 b[64]\n)\n{\n\t// block",
        );
        let bounded = with_block_threads(&with_map);
        assert!(
            bounded.contains("\t.param .align 64 .b8 a[128],\n\t.param .align 16 .b8 b[64]\n)\n.maxntid 384, 1, 1\n")
        );
        let plain = ptx.replace("384", "many");
        assert_eq!(with_block_threads(&plain), plain);
    }
}
