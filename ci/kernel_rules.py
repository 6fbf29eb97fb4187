"""The rules for every kernel's source, for ci/lint.

    kernel_rules.py self-test       checks that each rule refuses what breaks it, and nothing else
    kernel_rules.py check FOLDER    checks every .rs file below FOLDER, device/src/kernels

Invariant: a rule with no input fails. Finding no files or no contracts exits with status 1.
"""

import pathlib
import sys
import tempfile

# Expressions that dereference a pointer, or index a slice without a check.
TOUCHES = (".add(", ".offset(", ".read()", ".write(", "read_volatile", "get_unchecked", "from_raw_parts", "as_ptr()")


def stripped(source):
    return [line.strip() for line in source.splitlines()]


def bypasses(source):
    """Returns lines that access memory directly.

    Kernels must use `vector.rs` and `tile.rs`, where the race detector observes accesses.
    """
    return [line for line in stripped(source) if not line.startswith("//") and any(touch in line for touch in TOUCHES)]


def contracts(lines):
    """Returns the lines where contracts begin, by themselves or in a `family!`."""
    return [at for at, line in enumerate(lines) if line.startswith(("contract!", "contract unsafe"))]


def explained(lines, at):
    """Returns true if the comment before a line, ignoring attributes, has a `// SAFETY:`."""
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
    """Returns the contracts without a justification."""
    lines = stripped(source)
    return [lines[at] for at in contracts(lines) if not explained(lines, at)]


RULES = {
    "bypasses `vector.rs` and `tile.rs`, so the race detector cannot observe it": bypasses,
    "a contract without a `// SAFETY:` comment before it, which states why its checks suffice": unexplained,
}


def check(folder):
    """Checks all files below a folder; returns (errors, a summary)."""
    sources = {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(pathlib.Path(folder).rglob("*.rs"))}
    count = sum(len(contracts(stripped(source))) for source in sources.values())
    faults = [f"{name}: {rule}: {line}" for name, source in sources.items() for rule, breaks in RULES.items() for line in breaks(source)]
    if not sources or not count:
        faults.append(f"{folder}: {len(sources)} files and {count} contracts: nothing to check")
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
# Planted violations: the rule that must refuse each, the text of GOOD that is replaced, and the
# replacement.
BYPASS, REASONLESS = "bypasses", "a contract without"
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
    """Fails if a rule passes a planted violation or refuses correct sources."""

    def faults(files):
        with tempfile.TemporaryDirectory() as folder:
            for name, source in files.items():
                file = pathlib.Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(source)
            return check(folder)[0]

    if found := faults({"good.rs": GOOD}):
        raise SystemExit(f"self-test: refused correct sources: {found}")
    for what, (rule, old, new) in PLANTS.items():
        bad = GOOD.replace(old, new, 1)
        # By itself, and in a nested folder next to correct sources.
        for files in ({"bad.rs": bad}, {"good.rs": GOOD, "part/of/bad.rs": bad}):
            found = faults(files)
            if bad == GOOD or len(found) != 1 or rule not in found[0] or "bad.rs" not in found[0]:
                raise SystemExit(f"self-test: {what}: {found}")
    for what, files in {"no files": {}, "no contracts": {"part.rs": "fn part() {}\n"}}.items():
        found = faults(files)
        if len(found) != 1 or "nothing to check" not in found[0]:
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
