"""The rules that every kernel's source must keep, for ci/lint.

    kernel_rules.py self-test       each rule must refuse what breaks it, and nothing else
    kernel_rules.py check FOLDER    every .rs file below FOLDER, device/src/kernels

Invariant: a rule that finds nothing to look at has failed. No files, or no contracts, end the run with status 1.
"""

import pathlib
import sys
import tempfile

# What dereferences a pointer, or indexes a slice without a check.
TOUCHES = (".add(", ".offset(", ".read()", ".write(", "read_volatile", "get_unchecked", "from_raw_parts", "as_ptr()")


def stripped(source):
    return [line.strip() for line in source.splitlines()]


def bypasses(source):
    """Lines that touch memory themselves: kernels do so by `vector.rs` and `tile.rs` alone, where the race detector watches."""
    return [line for line in stripped(source) if not line.startswith("//") and any(touch in line for touch in TOUCHES)]


def contracts(lines):
    """The places where contracts begin, each by itself or in a `family!`."""
    return [at for at, line in enumerate(lines) if line.startswith(("contract!", "contract unsafe"))]


def explained(lines, at):
    """Whether a `// SAFETY:` stands in the comment before a line, attributes aside."""
    before = list(reversed(lines[:at]))
    while before and before[0].startswith("#["):
        before.pop(0)
    for line in before:
        if not line.startswith("//"):
            return False
        if line.startswith("// SAFETY:"):
            return True
    return False


def unexplained(source):
    """The contracts that do not say why they are enough."""
    lines = stripped(source)
    return [lines[at] for at in contracts(lines) if not explained(lines, at)]


RULES = {
    "goes around `vector.rs` and `tile.rs`, so that no race is seen here": bypasses,
    "a contract without a `// SAFETY:` comment before it: why does what it checks suffice?": unexplained,
}


def check(folder):
    """(faults, a summary) of all files below a folder."""
    sources = {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(pathlib.Path(folder).rglob("*.rs"))}
    count = sum(len(contracts(stripped(source))) for source in sources.values())
    faults = [f"{name}: {rule}: {line}" for name, source in sources.items() for rule, breaks in RULES.items() for line in breaks(source)]
    if not sources or not count:
        faults.append(f"{folder}: {len(sources)} files and {count} contracts: there is nothing to look at")
    return faults, f"{len(sources)} files, {count} contracts: every rule kept"


GOOD = """//! A kernel.
/// x.add(1)
fn copy(x: &[f32], out: *mut f32, row: usize) {
    // out.write(0.0)
    store(out, row, load(x, row));
}
// SAFETY: a thread writes the element of its index,
// and only where there is one.
#[cfg(x)]
contract!(unsafe copy {});
family! {
    // SAFETY: as above.
    contract unsafe {
    }
}
"""
REASON = "    // SAFETY: as above.\n"
# What is wrong: the rule that must refuse it, what of GOOD is replaced, and by what.
BYPASS, REASONLESS = "goes around", "a contract without"
PLANTS = {
    "a pointer that is moved": (BYPASS, "store(out", "*out.add(row) = 1.0;\n    store(out"),
    "a pointer that is moved by a distance": (BYPASS, "store(out", "out.offset(1);\n    store(out"),
    "a read by a pointer": (BYPASS, "store(out", "let y = out.read();\n    store(out"),
    "a write by a pointer": (BYPASS, "store(out", "out.write(1.0);\n    store(out"),
    "a volatile read": (BYPASS, "store(out", "core::ptr::read_volatile(out);\n    store(out"),
    "an index without a check": (BYPASS, "store(out", "let y = unsafe { x.get_unchecked(3) };\n    store(out"),
    "a slice of a pointer": (BYPASS, "store(out", "let y = core::slice::from_raw_parts(out, 3);\n    store(out"),
    "a slice's pointer": (BYPASS, "store(out", "let x = x.as_ptr();\n    store(out"),
    "a bypass before a comment": (BYPASS, "store(out", "out.write(1.0); // as it must be\n    store(out"),
    "a contract without a reason": (REASONLESS, "// SAFETY: a thread", "// A thread"),
    "a family's contract without a reason": (REASONLESS, REASON, ""),
    "a reason that belongs to something else": (REASONLESS, REASON, f"{REASON}    fn other() {{}}\n    // No reason.\n"),
    "a reason that an empty line parts from its contract": (REASONLESS, REASON, f"{REASON}\n"),
}


def self_test():
    """Ends with an error where a rule passes a planted violation, or refuses what is right."""

    def faults(files):
        with tempfile.TemporaryDirectory() as folder:
            for name, source in files.items():
                file = pathlib.Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(source)
            return check(folder)[0]

    if found := faults({"good.rs": GOOD}):
        raise SystemExit(f"self-test: refused what is right: {found}")
    for what, (rule, old, new) in PLANTS.items():
        bad = GOOD.replace(old, new, 1)
        # Alone, and in a folder of a folder beside what is right.
        for files in ({"bad.rs": bad}, {"good.rs": GOOD, "part/of/bad.rs": bad}):
            found = faults(files)
            if bad == GOOD or len(found) != 1 or rule not in found[0] or "bad.rs" not in found[0]:
                raise SystemExit(f"self-test: {what}: {found}")
    for what, files in {"no files": {}, "no contracts": {"part.rs": "fn part() {}\n"}}.items():
        found = faults(files)
        if len(found) != 1 or "nothing to look at" not in found[0]:
            raise SystemExit(f"self-test: {what}: {found}")
    print(f"{len(PLANTS) + 2} planted violations, each refused")


def main():
    match sys.argv[1:]:
        case ["self-test"]:
            return self_test()
        case ["check", folder]:
            faults, summary = check(folder)
            if faults:
                raise SystemExit("\n".join(faults))
            return print(summary)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
