//! The threads of a block, which PTX states as `.maxntid`, and for which rustc has no word.
//!
//! Without it, ptxas gives each thread of a kernel the same registers and ignores `setmaxnreg`. A
//! kernel therefore leaves a comment by `asm!("// block_threads 384")`, and this module writes
//! `.maxntid 384, 1, 1` between the kernel's parameters and its body. ci/ptx checks that no kernel
//! has `setmaxnreg` without it.

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
            (Some((head, body)), Some(threads)) if !head.contains(".maxntid") => {
                bounded += &format!("{head}\n.maxntid {threads}, 1, 1\n{{{body}");
            }
            _ => bounded += kernel,
        }
    }
    bounded
}

/// Returns the number in the comment of a kernel.
fn threads(kernel: &str) -> Option<&str> {
    let (_, rest) = kernel.split_once(COMMENT)?;
    let number = rest.lines().next()?.trim();
    number.bytes().all(|byte| byte.is_ascii_digit()).then_some(number).filter(|number| !number.is_empty())
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
        let plain = ptx.replace("384", "many");
        assert_eq!(with_block_threads(&plain), plain);
    }
}
