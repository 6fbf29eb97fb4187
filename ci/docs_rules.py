"""The checks of ci/docs on Markdown files.

    docs_rules.py text ROOT FILE...        checks paths, links, fences and the programs in commands
    docs_rules.py commands FILE...         prints each command to run, once: FILE:LINE, a tab, the command
    docs_rules.py adding ROOT              checks that CONTRIBUTING.md lists the files of its example, and
                                           that its code is in the files that it names
    docs_rules.py self-test                checks that each rule finds planted violations, and no others

ci/docs runs ```sh fences. ```sh gpu needs a GPU; ```sh slow takes minutes or runs in another script
of ci/. Text in other fences is not run, so it must not look like a command. Lines of a transcript
start with `$ `.
"""

import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

FENCE = re.compile(r"^\s*```(.*)$")
SHELL = {"sh", "sh gpu", "sh slow"}
COMMAND = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*(?:cargo\s|\.?ci/)")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Folders of this repository. Paths that start with them must exist.
ROOTS = {".ci", "benches", "ci", "device", "docs", "examples", "fuzz", "host", "tests"}
PATH = re.compile(r"^(?:\./)?([.a-z]+)/[\w./{},*-]*$")
PROGRAM = re.compile(r"--(example|bench|test)[ =](\w+)")
FOLDERS = {"example": "examples", "bench": "benches", "test": "tests"}


def lines_of(file):
    """Yields (number, fence or None, line); the lines of a fence have its info string."""
    fence = None
    for number, line in enumerate(pathlib.Path(file).read_text().splitlines(), 1):
        mark = FENCE.match(line)
        if mark and fence is None:
            fence = mark.group(1).strip()
            yield number, "open", fence
        elif mark:
            fence = None
        else:
            yield number, fence, line
    if fence is not None:
        yield number, "open", "a fence without an end"


def commands(file):
    """Yields (number, command) of each ```sh fence, without comments and blank lines, with
    continued lines joined."""
    pending = ""
    for number, fence, line in lines_of(file):
        if fence != "sh" or not line.strip() or line.lstrip().startswith("#"):
            continue
        pending += line.rstrip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        yield number, pending
        pending = ""


def alternatives(path):
    """Returns the paths that braces stand for."""
    brace = re.search(r"\{([^{}]*)\}", path)
    if not brace:
        return [path]
    before, after = path[: brace.start()], path[brace.end() :]
    return [whole for part in brace.group(1).split(",") for whole in alternatives(before + part + after)]


def missing(root, path):
    """Returns the alternatives of a path that are missing; capitals are wildcards, as in DATE."""
    pattern = lambda one: re.sub(r"[A-Z]{2,}", "*", one.rstrip("/"))
    there = lambda one: (root / one).exists() or any(root.glob(pattern(one)))
    return [one for one in alternatives(path) if not there(one)]


def programs(root, command):
    """Yields the programs of a command that do not exist."""
    for kind, name in PROGRAM.findall(command):
        folder = root / FOLDERS[kind]
        if not any(place.exists() for place in (folder / f"{name}.rs", folder / name / "main.rs")):
            yield f"no {kind} `{name}`"
    for word in command.split():
        if word.startswith(("ci/", ".ci/")) and not (root / word).exists():
            yield f"no {word}"


def text(root, files):
    """Yields violations of the rules for Markdown."""
    for file in files:
        folder = pathlib.Path(file).parent
        for number, fence, line in lines_of(file):
            at = f"{file}:{number}"
            if fence == "open":
                if line.split(" ")[0] in {"bash", "console", "shell", "sh"} and line not in SHELL:
                    yield f"{at}: ```{line}: use ```sh, ```sh gpu or ```sh slow"
                elif line == "a fence without an end":
                    yield f"{at}: {line}"
            elif fence in SHELL:
                yield from (f"{at}: {problem}" for problem in programs(root, line))
            elif fence is not None:
                if not fence.startswith(("rust", "python")) and COMMAND.match(line):
                    yield f"{at}: a command outside ```sh: {line.strip()}"
            else:
                for code in CODE.findall(line):
                    path = code.split("#")[0]
                    found = PATH.match(path)
                    if found and found.group(1) in ROOTS:
                        yield from (f"{at}: no {one}" for one in missing(root, path))
                    yield from (f"{at}: {problem}" for problem in programs(root, code))
                for target in LINK.findall(CODE.sub("", line)):
                    if "://" not in target and not target.startswith("#"):
                        if not (folder / target.split("#")[0]).exists():
                            yield f"{at}: a link to {target}, which is not there"


# The example of CONTRIBUTING.md, as code names it, and the pages, which are not listed.
EXAMPLE = re.compile(r"\b(?:layer_norm|LayerNorm)")
PAGES = ("docs/", "benches/", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "ci/")
# Models that use it. A new op would not be added to them.
MODELS = (
    "host/train/src/nn/block.rs",
    "host/models/",
    "tests/models/",
    "host/cli/src/train/",
    "examples/vit.rs",
    "tests/oracle/gpt_training.py",
    # This file names a key of config.json.
    "tests/programs/runs.rs",
    # These files repeat recorded lines of the benches.
    "host/cli/src/predict/against.rs",
    "host/cli/src/predict/bench.rs",
    "host/cli/src/predict/recorded.rs",
)


def adding(files):
    """Yields errors in the lists of CONTRIBUTING.md, given all files as path -> text.

    Its sections contain "`layer_norm`" before the table.
    """
    listed = set()
    for section in files["CONTRIBUTING.md"].split("\n## ")[1:]:
        before, _, table = section.partition("\n|---|")
        if "`layer_norm`" in before:
            rows = [row for row in table.split("\n\n")[0].splitlines() if row.startswith("| ")]
            listed |= {path for row in rows for path in CODE.findall(row.split("|")[1])}
    naming = {path for path, text in files.items() if not path.startswith(PAGES + MODELS) and EXAMPLE.search(text)}
    return (
        [f"CONTRIBUTING.md does not list {path}" for path in sorted(naming - listed)]
        + [f"CONTRIBUTING.md lists {path}, which does not name the example" for path in sorted(listed - naming)]
        + quoted(files)
    )


def quoted(files):
    """Returns errors for the ```rust fences of CONTRIBUTING.md. Their lines, without indentation, are
    in the file that the text before them names last."""
    unindented = lambda text: "\n".join(line.strip() for line in text.splitlines())
    errors, file = [], None
    for place, part in enumerate(re.split(r"^```", files["CONTRIBUTING.md"], flags=re.M)):
        if place % 2 == 0:
            file = ([path for path in CODE.findall(part) if path in files] or [file])[-1]
        elif part.startswith("rust\n") and unindented(part[5:]) not in unindented(files.get(file, "")):
            errors.append(f"CONTRIBUTING.md quotes code that is not in {file}: {part[5:].splitlines()[0]}")
    return errors


def tracked(root):
    """Returns the path and text of each text file that git tracks."""
    names = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [(name, pathlib.Path(root, name)) for name in names]
    return {name: path.read_text(errors="replace") for name, path in paths if path.is_file()}


def self_test():
    """Fails if a rule passes a planted violation, or refuses correct input."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path in ("host/core/src/ops", "tests/kernels", "examples/shown", "benches/runs", "ci", "docs"):
            (root / path).mkdir(parents=True)
        for path in ("host/core/src/ops/norm.rs", "examples/shown/main.rs", "benches/runs/2026-h200-arena.json", "ci/test", "README.md"):
            (root / path).write_text("")
        page = root / "docs/page.md"

        def found(content):
            page.write_text(content)
            return list(text(root, [page]))

        right = [
            "`host/core/src/ops/norm.rs`, `host/core/src/ops/{norm}.rs`, `host/core/src/ops/*.rs`, `ci/`, `a/b` and `benches/runs/DATE-GPU-arena.json`\n",
            "[home](../README.md#top), [there](https://example.org), [`code`](#here)\n",
            "```sh\ncargo run --example shown # ci/test\nci/test\n```\n",
            "```sh gpu\ncargo run --example shown\n```\n```text\n$ cargo run\nout\n```\n```rust\nlet x = 1;\n```\n",
        ]
        wrong = {
            "a missing path": "`host/core/src/ops/gone.rs`\n",
            "one missing alternative": "`host/core/src/ops/{norm,gone}.rs`\n",
            "a glob of nothing": "`tests/kernels/*.rs`\n",
            "a dead link": "[there](gone.md)\n",
            "an example that is not there": "```sh\ncargo run --example hidden\n```\n",
            "a bench that is not there": "```sh gpu\ncargo bench --bench hidden\n```\n",
            "a test that is not there, in a sentence": "run `cargo test --test hidden`\n",
            "a script that is not there": "```sh slow\nci/gone\n```\n",
            "a command that is not run": "```text\nSEED=1 cargo run\n```\n",
            "another word for a shell": "```bash\nls\n```\n",
            "an unknown tag": "```sh later\nls\n```\n",
            "a fence without an end": "```sh\nls\n",
        }
        for content in right:
            if problems := found(content):
                raise SystemExit(f"refused a correct page: {problems}")
        for what, content in wrong.items():
            if not found(content):
                raise SystemExit(f"passed {what}")
            print(f"refused: {what}")
        page.write_text("```sh\n# why\nls \\\n  -l\n\nls # so\n```\n```sh gpu\nno\n```\n```sh slow\nno\n```\n")
        if [command for _, command in commands(page)] != ["ls   -l", "ls # so"]:
            raise SystemExit(f"the commands are {list(commands(page))}")

    page = "# A\n\n## B\n\n`layer_norm`:\n\n| f | w |\n|---|---|\n| `a.rs`, `b.rs` | w |\n\nSee `c.rs`.\n\n```rust\nfn norm() {\n    x\n}\n```\n"
    naming = {"CONTRIBUTING.md": page, "a.rs": "fn layer_norm_forward()", "b.rs": "struct LayerNorm", "c.rs": "mod c {\n    fn norm() {\n        x\n    }\n}\n"}
    if problems := adding(naming):
        raise SystemExit(f"refused a right list: {problems}")
    for what, plant in (
        ("a list that lacks a file", {"c.rs": "layer_norm() " + naming["c.rs"]}),
        ("a list that has one too many", {"b.rs": ""}),
        ("code that is not in its file", {"c.rs": "fn norm() {\n    y\n}\n"}),
    ):
        if not adding(naming | plant):
            raise SystemExit(f"passed {what} in CONTRIBUTING.md")
        print(f"refused: {what} in CONTRIBUTING.md")


def main(arguments):
    match arguments:
        case ["text", root, *files] if files:
            problems = list(text(pathlib.Path(root), files))
        case ["commands", *files] if files:
            # Commands that appear on several pages run once.
            seen = set()
            for file in files:
                for number, command in commands(file):
                    words = tuple(shlex.split(command, comments=True))
                    if words not in seen:
                        print(f"{file}:{number}\t{command}")
                    seen.add(words)
            return
        case ["adding", root]:
            problems = adding(tracked(root))
        case ["self-test"]:
            return self_test()
        case _:
            raise SystemExit(__doc__)
    if problems:
        raise SystemExit("\n".join(problems))


main(sys.argv[1:])
