//! PTX split into parts of one kernel each, so that the driver compiles them in parallel.
//!
//! Invariant: a part contains everything that its kernel names. PTX stays whole if kernels may
//! share more than functions, or if it does not have the form that compilers write.

#![forbid(unsafe_code)]

/// The start of a kernel as compilers write it, at the start of a line.
const ENTRY: &str = ".visible .entry ";
/// Items that kernels would share: variables, and debug sections, which name the addresses of all
/// kernels. The last entry detects a kernel that begins differently.
const SHARED: [&str; 4] = [".global ", ".const ", ".section", ".entry "];

/// PTX, and the names of the kernels in it: one, or all.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) kernels: Vec<&'a str>,
    pub(super) ptx: String,
}

/// Splits a text into parts, the longest first.
pub(super) fn parts(ptx: &str) -> Vec<Part<'_>> {
    let (mut common, mut kernels) = (String::new(), Vec::new());
    let mut rest = ptx;
    while let Some(start) = line_that_begins(rest, ENTRY) {
        // A body's closing brace is the first character of a line.
        let Some(end) = line_that_begins(&rest[start..], "}") else { break };
        let (before, kernel) = (&rest[..start], &rest[start..=start + end]);
        common.push_str(before);
        // Later text may use what is declared so far, and later declarations may use it.
        kernels.push((common.len(), kernel));
        rest = &rest[start + end + 1..];
    }
    common.push_str(rest);
    let mut code = common.lines().filter(|line| !line.starts_with("//"));
    if code.any(|line| SHARED.iter().any(|kind| line.contains(kind))) {
        return vec![Part { kernels: names(ptx), ptx: ptx.to_owned() }];
    }
    let part = |(at, kernel): (usize, _)| Part {
        kernels: names(kernel),
        ptx: [&common[..at], kernel, &common[at..]].concat(),
    };
    let mut parts: Vec<Part<'_>> = kernels.into_iter().map(part).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.ptx.len()));
    parts
}

/// Returns the names of the kernels in a text.
fn names(ptx: &str) -> Vec<&str> {
    let ends = |letter: char| letter == '(' || letter.is_whitespace();
    ptx.split(".entry ").skip(1).filter_map(|text| text.split(ends).next()).collect()
}

/// Returns the offset of the first line that begins with `with`.
fn line_that_begins(text: &str, with: &str) -> Option<usize> {
    if text.starts_with(with) {
        return Some(0);
    }
    text.find(&format!("\n{with}")).map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = ".version 7.8\n.func f\n;\n.visible .entry a(\n\t.param .u64 p\n)\n{\n\t{\n\t}\n\tret;\n}\n\n.visible .entry longer()\n{\n\tcall f;\n\tret;\n}\n\
                       .func f()\n{\n\tret;\n}\n";

    #[test]
    fn each_part_includes_shared_code() {
        let parts = parts(TWO);
        let text = |name: &str| &parts.iter().find(|part| part.kernels == [name]).expect("a part").ptx;
        assert_eq!(parts.len(), 2);
        assert_eq!(
            *text("a"),
            ".version 7.8\n.func f\n;\n.visible .entry a(\n\t.param .u64 p\n)\n{\n\t{\n\t}\n\tret;\n}\n\n\n.func f()\n{\n\tret;\n}\n"
        );
        assert!(text("longer").contains("call f;") && !text("longer").contains(".entry a("));
        assert!(parts[0].ptx.len() >= parts[1].ptx.len());
    }

    #[test]
    fn shared_variables_stay_whole() {
        for variable in [".global .align 4 .u32 counter;\n", ".visible .const .b8 table[4] = {1, 2, 3, 4};\n"] {
            stays_whole(&TWO.replace(".func f\n;\n", variable));
        }
    }

    #[test]
    fn unknown_formats_stay_whole() {
        stays_whole(&TWO.replace(".visible .entry longer", ".weak .entry longer"));
        stays_whole(&TWO.replace(".visible .entry longer", "\t.visible .entry longer"));
        stays_whole(&TWO.replace(".visible .entry", ".entry"));
        stays_whole(&TWO.replace("\n}", "\n\t}"));
        stays_whole(&format!("{TWO}\t.section .debug_info\n\t{{\n.b64 a\n\t}}\n"));
    }

    fn stays_whole(ptx: &str) {
        let parts = parts(ptx);
        assert_eq!((parts.len(), &*parts[0].ptx, &parts[0].kernels[..]), (1, ptx, &["a", "longer"][..]));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn library_has_one_part_per_kernel() {
        for (_, ptx) in crate::device::kernels::OWN.ptx {
            let parts = parts(ptx);
            assert_eq!(parts.len(), ptx.matches(".entry ").count());
            for Part { kernels, ptx } in &parts {
                assert_eq!((kernels.len(), ptx.matches(".entry ").count()), (1, 1), "{kernels:?}");
                assert_eq!(ptx.matches('{').count(), ptx.matches('}').count(), "{kernels:?}");
                assert!(ptx.contains(&format!(".entry {}(", kernels[0])) && ptx.contains(".version "), "{kernels:?}");
            }
        }
    }
}
