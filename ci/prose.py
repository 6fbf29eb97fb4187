"""The rules of prose that a regular expression can hold, for ci/lint.

    prose.py self-test        checks that each rule refuses a planted sentence, and passes good ones
    prose.py check FILE...    checks pages (.md), and the comments of Rust files

Quoted code, tables, links, the contents of fences and generated lines, which begin with a date, are
exempt. Invariant: no files is a failure.
"""

import pathlib
import re
import sys

COLUMNS = 100
OPENING = re.compile(r"(?:^|[.!?:] )(Of|Behind|Beside|By|As for) (?!default\b|hand\b)")
TIME = re.compile(r"\b(beside|Beside)\b|\balone(?=[.,;:)]|$)|\bbehind (?:it|them|which|this|that|an? (?:launch|update|step))\b")
DOC_START = re.compile(r"^(What|Whether|Who|How|Where|Which|The same|As for|Of)\b")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")


def wrong(text, is_doc_start):
    """Yields the rules that a line of prose breaks."""
    plain = CODE.sub("`x`", text)
    if found := OPENING.search(plain):
        yield f"a sentence opens with {found.group(1)}"
    if found := TIME.search(plain):
        yield f"`{found.group(0)}`: write after, next to, compared with, or only"
    if is_doc_start and (found := DOC_START.match(plain)):
        yield f"a doc comment begins with {found.group(1)}: write a noun phrase or a third-person verb"


def page(lines):
    """Yields the number and the problem of each wrong line of a page."""
    fence = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence and not re.match(r"\||<!--|#|20\d\d-", line):
            if len(line) > COLUMNS and "](" not in line and " " in line.strip()[:COLUMNS]:
                yield number, f"{len(line)} columns"
            for rule in wrong(line.lstrip("-*> 0123456789."), False):
                yield number, rule


def source(lines):
    """Yields the number and the problem of each wrong comment of a Rust file."""
    fence, before = False, ""
    for number, line in enumerate(lines, 1):
        comment = re.match(r"\s*(///|//!|//)(?: (.*)|$)", line)
        kind, text = (comment.group(1), comment.group(2) or "") if comment else ("", "")
        if kind in ("///", "//!") and text.startswith("```"):
            fence = not fence
        elif kind and not fence and not text.startswith("|"):
            if len(line) > COLUMNS and "](" not in line and "http" not in line:
                yield number, f"{len(line)} columns"
            starts = kind in ("///", "//!") and before != kind
            for rule in wrong(text, starts):
                yield number, rule
        if not kind:
            fence = False
        before = kind


def problems(path):
    lines = path.read_text().splitlines()
    check = page if path.suffix == ".md" else source
    return [f"{path}:{number}: {problem}" for number, problem in check(lines)]


def self_test():
    bad_pages = ["Of GPT-2 the opposite holds.", "It ends. By turns it runs.", "It runs beside the copy.", "Weights alone.", "x " * 60]
    bad_sources = [
        "/// What a step holds.",
        "/// As for [`Step::lend`].",
        "//! Whether it ends.",
        "// It waits behind it.",
        "    /// Of memory it has enough.",
        "// " + "word " * 24,
    ]
    good_page = ["By default it waits. The copy runs concurrently.", "```", "Of beside " * 20, "```", "| Of a | beside |"]
    good_source = ["/// Returns what a step holds.", "/// How is no start here.", "let of = 1; // code", "/// ```", "/// Of", "/// ```"]
    for text in bad_pages:
        assert list(page([text])), f"passed: {text}"
    for text in bad_sources:
        assert list(source([text])), f"passed: {text}"
    assert not list(page(good_page)), list(page(good_page))
    assert not list(source(good_source)), list(source(good_source))
    print(f"{len(bad_pages) + len(bad_sources)} planted sentences, each refused")


def main():
    match sys.argv[1:]:
        case ["self-test"]:
            self_test()
        case ["check", *names] if names:
            found = [problem for name in names for problem in problems(pathlib.Path(name))]
            print("\n".join(found) if found else f"{len(names)} files")
            sys.exit(1 if found else 0)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
