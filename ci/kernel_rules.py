"""Checks for ci/lint that a `// SAFETY:` comment precedes each contract of a kernel, and states why
the contract's checks suffice. clippy cannot check this: a macro makes the contract's `unsafe impl`.

    kernel_rules.py FOLDER    checks every .rs file below FOLDER, after planted violations
"""

import pathlib
import re
import sys

CONTRACT = re.compile(r"^ *(?:contract!|contract unsafe)", re.M)
# The comment ends directly before the contract's attributes.
EXPLAINED = re.compile(r"^ *// SAFETY:.*\n(?: *//.*\n)*(?: *#\[.*\n)*\Z", re.M)


def contracts(source):
    """Returns the lines of all contracts, and those of contracts without a reason."""
    starts = [match.start() for match in CONTRACT.finditer(source)]
    line = lambda at: source.count("\n", 0, at) + 1
    return list(map(line, starts)), [line(at) for at in starts if not EXPLAINED.search(source[:at])]


GOOD = """// SAFETY: a thread writes the element of its index,
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
PLANTS = {
    "a contract without a reason": ("// SAFETY: a thread", "// A thread"),
    "a family's contract without a reason": (REASON, ""),
    "a reason of something else": (REASON, f"{REASON}    fn other() {{}}\n    // No reason.\n"),
    "a reason that an empty line separates": (REASON, f"{REASON}\n"),
}


def main(folder):
    assert len(contracts(GOOD)[0]) == 2 and not contracts(GOOD)[1], contracts(GOOD)
    for what, (old, new) in PLANTS.items():
        assert len(contracts(GOOD.replace(old, new))[1]) == 1, f"passed {what}"
    found = {path: contracts(path.read_text()) for path in sorted(pathlib.Path(folder).rglob("*.rs"))}
    count = sum(len(every) for every, _ in found.values())
    faults = [f"{path}:{line}: a contract without a `// SAFETY:` comment before it" for path, (_, bad) in found.items() for line in bad]
    if faults or not count:
        sys.exit("\n".join(faults) or f"{folder} has no contract")
    print(f"{len(PLANTS)} planted violations, each refused; {count} contracts, each with a reason")


main(*sys.argv[1:])
