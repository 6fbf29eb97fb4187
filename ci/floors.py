"""The floors of the source: no import goes up, none goes in a circle. For ci/lint.

    floors.py check ROOT    the sources below ROOT against the tables in ROOT/docs/architecture.md
    floors.py self-test     each rule refuses a planted violation and passes what is right

A row of a table is a floor, the lowest first; its first cell names the floor's modules in backticks: a file, a folder, or
`folder/*.rs`, whose modules do not use each other. A module uses its own floor and those below. The crate's root may use all.

What counts as an import of a file: a path in a `use`, and a path elsewhere that starts with `crate`, `self`, `super`, a child or a
name that a `use` has bound. It is an import of the file that defines the item: re-exports, of single names and by `*`, are
followed, and a `pub use` is an import too. Left out is what stands under `cfg(test)`, `cfg(doctest)` and `cfg(loom)`, and in
comments; in a macro's definition only what starts with `crate` counts. Not seen are methods and fields: an `impl` in another file imports its type, who calls the method need not. A path into
the crate that leads nowhere is a failure, so what cannot be read does not pass; but for `self` and `super` in a macro's arguments.
"""

import fnmatch
import pathlib
import re
import sys
import tempfile

# A crate's folder; the heading over its table, and what the names there begin with.
CRATES = {"host": ("## The host side", ""), "device/src": ("## The device side", "src/")}

# Imports that no rule is asked about, and why. One that breaks no rule is refused.
EXCEPTIONS = {
    "host": {
        ("same_bits/[acp]*.rs", "same_bits/inputs.rs"): "a case holds a function of its inputs, and inputs are made for a case",
    },
    "device/src": {
        ("kernels/attention/head.rs", "kernels/attention.rs"): "the sizes of a head stand beside the kernels",
        ("kernels/matmul/*.rs", "kernels/matmul.rs"): "what all products share stands beside the kernels",
        ("kernels/matmul_*", "kernels/matmul*"): "products by matrix instructions share epilogue, checks and split",
        ("kernels/flash_attention_tensor*", "kernels/flash_attention/place.rs"): "heads of either type lie alike, and see alike",
        ("kernels/precision.rs", "kernels/matmul/checks.rs"): "what is rounded is checked as the product's operand",
    },
}

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*)
    |(?P<raw>b?r(?P<hashes>\#*)".*?"(?P=hashes))
    |(?P<string>b?c?"(?:\\.|[^"\\])*")
    |(?P<char>b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^'\\])')
    |(?P<life>'\w+)
    |(?P<name>(?:r\#)?[A-Za-z_]\w*)
    |(?P<number>\d\w*)
    |(?P<colons>::)
    |(?P<mark>.)""",
    re.S | re.X,
)
BRACKETS = ("(", "[", "{")
WORD = re.compile(r"[A-Za-z_]")
ITEMS = {"fn", "struct", "enum", "union", "trait", "type", "const", "static"}


def tokens(text):
    """[(text, line)] without comments."""
    found, at, line = [], 0, 1
    while at < len(text):
        begin = at
        if text.startswith("/*", at):
            depth, end = 1, at + 2
            while depth:
                mark = re.compile(r"/\*|\*/").search(text, end)
                depth, end = depth + (1 if mark.group() == "/*" else -1), mark.end()
            at = end
            line += text.count("\n", begin, at)
            continue
        match = TOKEN.match(text, at)
        if match.lastgroup != "skip":
            found.append((match.group(), line))
        at = match.end()
        line += text.count("\n", begin, at)
    return found


def closing(code, at):
    """The place behind the bracket that closes the one at `at`."""
    depth = 0
    while True:
        depth += (code[at][0] in BRACKETS) - (code[at][0] in (")", "]", "}"))
        at += 1
        if depth == 0:
            return at


def without_tests(code):
    """The same tokens without the items that no build of the library has: those under `cfg(test)`, alone or in an `all`, and
    likewise `doctest` and `loom`."""
    kept, at = [], 0
    while at < len(code):
        if code[at][0] == "#" and code[at + 1][0] == "[":
            words = "".join(text for text, _ in code[at : closing(code, at + 1)])
            if re.match(r"#\[cfg\((?:all\()?(?:test|doctest|loom)\b", words):
                at = item_end(code, closing(code, at + 1))
                continue
        kept.append(code[at])
        at += 1
    return kept


def item_end(code, at):
    """The place behind the item at `at`: behind its `;`, or behind its body, which a `use` has not."""
    while code[at][0] == "#":
        at = closing(code, at + 1)
    ends = (";",) if code[at][0] == "use" else (";", "{")
    while code[at][0] not in ends:
        at = closing(code, at) if code[at][0] in BRACKETS else at + 1
    return at + 1 if code[at][0] == ";" else closing(code, at)


def tree(code, at):
    """([(path, name it gets or `*`)], the place behind) of what stands after `use` at `at`."""
    path, found = [], []
    while True:
        text = code[at][0]
        if text == "{":
            at += 1
            while code[at][0] != "}":
                more, at = tree(code, at)
                # `{self, ..}` is the path itself.
                found += [(path if inner == ["self"] else path + inner, path[-1] if name == "self" else name) for inner, name in more]
                at += code[at][0] == ","
            return found, at + 1
        if text == "*":
            return [(path, "*")], at + 1
        at += 1
        if text == "::":
            continue
        path.append(text)
        if code[at][0] == "as":
            return [(path, code[at + 1][0])], at + 2
        if code[at][0] != "::":
            if path[-1] == "self" and len(path) > 1:
                path = path[:-1]
            return [(path, path[-1])], at


class Module:
    """A module: of a file, or one that stands within a file."""

    def __init__(self, name, parent, file=None):
        self.name, self.parent, self.file = name, parent, file
        self.root = parent.root if parent else self
        # Items by the file that defines them; `use`s as (path, name or `*`, line); other paths as (path, line, in a macro's arguments).
        self.children, self.items, self.uses, self.paths = {}, {}, [], []

    def bound(self, name):
        return [path for path, given, _ in self.uses if given == name]

    def all(self):
        yield self
        for child in self.children.values():
            yield from child.all()


def read(root):
    """The root module of a crate, by its file; paths of files are relative to that one's folder."""
    top = Module("crate", None)
    load(top, root, root.parent, root.parent)
    return top


def load(module, file, home, folder):
    module.file = file.relative_to(folder).as_posix()
    scan(module, without_tests(tokens(file.read_text())), home, folder)


def scan(module, code, home, folder):
    """Notes what stands in a module's code. `home` is where its children's files are, `folder` the crate's."""
    at, attributes = 0, []
    while at < len(code):
        text = code[at][0]
        if text == "#":
            begin = at + 1 + (code[at + 1][0] == "!")
            at = closing(code, begin)
            attributes.append(code[begin:at])
            continue
        if text == "mod" and code[at + 2][0] in (";", "{"):
            name = code[at + 1][0]
            child = module.children[name] = Module(name, module, module.file)
            paths = [part[3][0].strip('"') for part in attributes if part[1][0] == "path"]
            inner = home / (paths[0] if paths else name)
            if code[at + 2][0] == ";":
                flat = home / f"{name}.rs"
                load(child, flat if flat.exists() else inner / "mod.rs", inner, folder)
                at += 3
            else:
                behind = closing(code, at + 2)
                scan(child, code[at + 3 : behind - 1], inner, folder)
                at = behind
        elif text == "macro_rules":
            exported = any(part[1][0] == "macro_export" for part in attributes)
            (module.root if exported else module).items[code[at + 2][0]] = module.file
            behind = closing(code, at + 3)
            for place in range(at + 3, behind):
                # Other paths are the caller's.
                if code[place][0] == "crate":
                    note(module, code, place, "use" in (code[place - 1][0], code[place - 2][0]))
            at = behind
        elif text in ITEMS and WORD.match(code[at + 1][0]) and code[at + 1][0] not in ITEMS | {"unsafe", "extern"}:
            module.items[code[at + 1][0]] = module.file
            at += 2
        elif text in BRACKETS:
            behind = closing(code, at)
            inside_body(module, code, at, behind, behind if at and code[at - 1][0] == "!" else at)
            at = behind
        elif text == "pub" and code[at + 1][0] == "(":
            at = closing(code, at + 1)
            continue
        else:
            at = note(module, code, at, text == "use")
            if WORD.match(text):
                continue
        attributes = []


def inside_body(module, code, at, behind, arguments_end):
    """Notes what stands between two places; up to `arguments_end` it is a macro's arguments."""
    while at < behind:
        if code[at][0] == "pub" and code[at + 1][0] == "(":
            at = closing(code, at + 1)
            continue
        if code[at][0] in BRACKETS and code[at - 1][0] == "!":
            arguments_end = max(arguments_end, closing(code, at))
        at = note(module, code, at, code[at][0] == "use", at < arguments_end)


def note(module, code, at, imports=False, argument=False):
    """Notes the path at `at`, or the `use` if it `imports`; returns the place behind it."""
    text, line = code[at]
    if imports:
        found, behind = tree(code, at + (text == "use"))
        module.uses += [(path, name, line) for path, name in found]
        return behind
    if not WORD.match(text):
        return at + 1
    path, at = [text], at + 1
    while at + 1 < len(code) and code[at][0] == "::" and WORD.match(code[at + 1][0]):
        path.append(code[at + 1][0])
        at += 2
    module.paths.append((path, line, argument))
    return at


class Unknown(Exception):
    """A path into the crate that leads nowhere."""


# What is not of the crate.
OUTSIDE = object()


def resolve(module, path, seen=(), of_glob=False):
    """What a path stands for in a module: the module, the file that defines the item, or OUTSIDE. A glob's path is a module's."""
    if (module, tuple(path)) in seen:
        return OUTSIDE
    seen += ((module, tuple(path)),)
    head, rest = path[0], path[1:]
    if head not in ("crate", "self", "super"):
        return look_up(module, head, rest, seen, of_glob) or OUTSIDE
    start = {"crate": module.root, "self": module, "super": module.parent}[head]
    while rest and rest[0] == "super":
        start, rest = start.parent, rest[1:]
    return within(start, rest, seen, of_glob)


def within(module, path, seen, of_glob=False):
    if not path:
        return module
    found = look_up(module, path[0], path[1:], seen, of_glob)
    if found is None:
        raise Unknown(f"{module.name} has no {path[0]}")
    return found


def look_up(module, name, rest, seen, of_glob=False):
    """What `name::rest` stands for in a module, or None: an item, what a `use` binds it to, what a glob brings, a child. A child
    goes first where the path goes on."""
    if (rest or of_glob) and name in module.children:
        return within(module.children[name], rest, seen, of_glob)
    if name in module.items:
        return module.items[name]
    for path in module.bound(name):
        if path != [name]:
            found = resolve(module, path, seen)
            return within(found, rest, seen) if isinstance(found, Module) else found
    for path in module.bound("*"):
        target = resolve(module, path, seen, of_glob=True)
        found = look_up(target, name, rest, seen) if isinstance(target, Module) and target is not module else None
        if found is not None:
            return found
    return module.children.get(name)


def imports(top):
    """{(importing file, imported file): {line: path}}, and the paths into the crate that lead nowhere."""
    found, lost = {}, []
    for module in top.all():
        globs = module.bound("*")
        paths = [(path, line, name == "*", False) for path, name, line in module.uses]
        # A bare name is bound here or by a `use`, which was noted; what a glob brings is known by its bare name alone.
        paths += [(path, line, True, argument) for path, line, argument in module.paths if len(path) > 1 or globs]
        for path, line, whole, argument in paths:
            try:
                target = resolve(module, path, of_glob=whole and path in globs)
            except Unknown as error:
                # The macro may make a module of its arguments, where `self` and `super` are others.
                if argument and path[0] in ("self", "super"):
                    continue
                lost.append(f"{module.file}:{line}: `{'::'.join(path)}` leads nowhere: {error}")
                continue
            if target is OUTSIDE or isinstance(target, Module) and not whole:
                # A module that is imported by its name is used by the paths that go through it.
                continue
            file = target.file if isinstance(target, Module) else target
            if file != module.file:
                found.setdefault((module.file, file), {})[line] = "::".join(path)
    return found, lost


class Floors:
    """A table: which floor a file is on, and of which module it is a part."""

    def __init__(self, page, heading, prefix):
        section = page.partition(heading)[2].split("\n## ", 1)[0]
        table = re.search(r"(?:^\|.*\n)+", section, flags=re.M)
        cells = re.findall(r"^\| (.*?) \|", table.group(), flags=re.M) if table else []
        rows = [re.findall(r"`([^`]+)`", cell) for cell in cells]
        self.rows = [[name.removeprefix(prefix) for name in names] for names in rows if names and names[0].startswith(prefix)]

    def of(self, file):
        """(floor, module) of a file, or None. A name that says more of the path goes first."""
        found = []
        for floor, names in enumerate(self.rows):
            for name in names:
                folder = name.removesuffix("*.rs")
                if file == name or name.endswith("/") and file.startswith(name):
                    found.append((len(name), floor, name))
                elif folder != name and file.startswith(folder):
                    found.append((len(folder), floor, folder + file[len(folder) :].split("/")[0].removesuffix(".rs")))
        return max(found)[1:] if found else None

    def unused(self, files):
        return [name for names in self.rows for name in names if not any(fnmatch.fnmatch(file, self.pattern(name)) for file in files)]

    @staticmethod
    def pattern(name):
        return name + "*" if name.endswith("/") else name


def circles(edges):
    """The strongly connected components of more than one file, each sorted."""
    graph = {}
    for importer, imported in edges:
        graph.setdefault(importer, []).append(imported)
        graph.setdefault(imported, [])

    def reached(start):
        seen, left = set(), [start]
        while left:
            for file in graph[left.pop()]:
                if file not in seen:
                    seen.add(file)
                    left.append(file)
        return seen

    reach = {file: reached(file) for file in graph}
    return sorted({tuple(sorted(other for other in reach[file] if file in reach[other])) for file in graph if file in reach[file]})


def around(top):
    """{(file, file of a module around it)}."""
    found = set()
    for module in top.all():
        above = module.parent
        while above:
            found.add((module.file, above.file))
            above = above.parent
    return {(file, above) for file, above in found if file != above}


def faults(edges, floors, nested):
    """[(message, edges that it is about)] of imports that are allowed by no rule."""
    found = []
    for (importer, imported), lines in sorted(edges.items()):
        line, path = min(lines.items())
        at = f"{importer}:{line}: `{path}`, of {imported}, "
        low, high = floors.of(imported), floors.of(importer)
        if low and high and low[0] > high[0]:
            found.append((at + f"is on floor {low[0] + 1}, this file on floor {high[0] + 1}", {(importer, imported)}))
        elif low and high and low[0] == high[0] and low[1] != high[1] and "*" in "".join(floors.rows[low[0]]):
            found.append((at + "is another module of a floor whose modules do not use each other", {(importer, imported)}))
        if (importer, imported) in nested:
            found.append((at + "stands in the file of a module around this one: give it a file of its own", {(importer, imported)}))
    for files in circles(edges):
        inside = {edge for edge in edges if set(edge) <= set(files)}
        found.append((f"a circle of files: {', '.join(files)}", inside))
    return found


def check(folder, page, heading, prefix, exceptions):
    """(faults, a summary) of a crate."""
    top = read(folder / "lib.rs")
    edges, lost = imports(top)
    floors, nested = Floors(page, heading, prefix), around(top)
    files = sorted({module.file for module in top.all()})
    problems = lost + ([] if floors.rows else [f"no table under `{heading}`"])
    problems += [f"{file}: on no floor of the table under `{heading}`" for file in files if file != "lib.rs" and not floors.of(file)]
    problems += [f"the table under `{heading}` names {name}, which is not there" for name in floors.unused(files)]
    excused = {pair: {edge for edge in edges if all(map(fnmatch.fnmatch, edge, pair)) and edge[0] != edge[1]} for pair in exceptions}
    broken = set().union(*(about for _, about in faults(edges, floors, nested)))
    for pair, found in excused.items():
        if not found & broken:
            problems.append(f"the exception {' -> '.join(pair)} is not needed: remove it from ci/floors.py")
    left = {edge: lines for edge, lines in edges.items() if not any(edge in found & broken for found in excused.values())}
    problems += [message for message, _ in faults(left, floors, nested)]
    count = sum(map(len, edges.values()))
    return problems, f"{len(floors.rows)} floors, {len(files)} files, {count} imports"


def check_all(root):
    page = (root / "docs/architecture.md").read_text()
    problems = []
    for folder, (heading, prefix) in CRATES.items():
        exceptions = EXCEPTIONS[folder]
        found, summary = check(root / folder, page, heading, prefix, exceptions)
        problems += [f"{folder}/{fault}" if re.match(r"\S+\.rs:", fault) else f"{folder}: {fault}" for fault in found]
        print(f"{folder}: {summary}; {f'faults: {len(found)}' if found else 'none goes up or in a circle'}, but for {len(exceptions)} that are named:")
        for pair, reason in exceptions.items():
            print(f"    {' -> '.join(pair)}: {reason}")
    if problems:
        raise SystemExit("\n".join(problems))


# What is right: every form of an import, a floor of modules that do not use each other, and tests, which may do anything.
HOUSE = {
    "lib.rs": "mod low;\nmod mid;\nmod top;\nmod each;\npub use top::Top;\n",
    "low.rs": """//! `crate::top::Top`
        /* crate::top::Top /* nested */ */
        pub struct Low; pub(crate) const TEXT: (&str, char) = ("crate::top::Top", '"');
        #[cfg(test)] mod tests { use crate::top::Top; }
        #[cfg(all(test, not(loom)))] use crate::{top::Top, mid};
        #[cfg(loom)] use crate::nowhere::{At, All};
        #[macro_export] macro_rules! made { () => { $crate::low::Low } }
        macro_rules! theirs { () => { use super::top::Top; top::Top } }
        theirs! { fn f() -> self::Made {} }
    """,
    "mid/mod.rs": "mod leaf;\nmod other;\npub use leaf::{Leaf, Leaf as Named};\npub use other::*;\n",
    "mid/leaf.rs": "use crate::low::{self, Low};\npub struct Leaf(pub Low, low::Low);\n",
    "mid/other.rs": "use super::Leaf;\npub fn other(_: Leaf) -> crate::low::Low { crate::made!() }\n",
    "top.rs": "use crate::mid::{Named, other};\npub struct Top;\nfn f() { other(Named(super::low::Low, todo!())); }\n",
    "each/mod.rs": "mod a;\nmod b;\n",
    "each/a.rs": "mod part;\npub struct A;\n",
    "each/a/part.rs": "pub struct Part;\n",
    "each/b.rs": "use std::fmt;\nuse fmt::Debug;\npub trait B: Debug {}\n",
}
PAGE = "## The host side\n\n| floor | what |\n|---|---|\n| `low.rs` | x |\n| `mid/` | `top.rs` |\n| `top.rs` | x |\n| `each/mod.rs`, `each/*.rs` | x |\n\n## Next\n\n| `none.rs` | x |\n"
# What is wrong: what is added to the house's files, and what the fault says.
UP, CIRCLE, NOWHERE = "this file on floor", "a circle of files", "leads nowhere"
PLANTS = {
    "an upward import": (UP, {"low.rs": "use crate::top::Top;"}),
    "one inside a group": (UP, {"low.rs": "use crate::{each, mid::{Leaf as Other}};"}),
    "one by way of a re-export": (UP, {"low.rs": "use crate::Top;"}),
    "one by way of a glob": (UP, {"low.rs": "use crate::mid::*;\nfn f() { other() }"}),
    "a path without a `use`": (UP, {"low.rs": "fn f() -> crate::top::Top { todo!() }"}),
    "a path through a module that was imported": (UP, {"low.rs": "use super::top as above;\nfn f() -> above::Top { todo!() }"}),
    "one in a module within the file": (UP, {"low.rs": "mod inner { use super::super::top::Top; }"}),
    "one in a macro": (UP, {"low.rs": "macro_rules! up { () => { $crate::top::Top } }"}),
    "one in a macro of this crate alone": (UP, {"low.rs": "macro_rules! up { () => { crate::top::Top } }"}),
    "a `use` in a macro": (UP, {"low.rs": "macro_rules! up { () => { use $crate::top::{self, Top}; } }"}),
    "one in a macro's arguments": (UP, {"low.rs": "fn f() { println!(\"{:?}\", super::top::Top) }"}),
    "one behind a test": (UP, {"low.rs": "#[cfg(test)]\nmod more { use crate::top::Top; }\nuse crate::top::Top;"}),
    "one between what looks like a comment": (UP, {"low.rs": 'const A: &str = "/*"; use crate::top::Top; const B: &str = r#""*/"#;'}),
    "one behind a comment in a comment": (UP, {"low.rs": "/* /* */ ' */ use crate::top::Top;"}),
    "one in a build without tests": (UP, {"low.rs": "#[cfg(not(test))]\nuse crate::top::Top;"}),
    "a re-export upwards": (UP, {"low.rs": "pub use crate::top::Top;"}),
    "a circle of two files": (CIRCLE, {"mid/leaf.rs": "use super::other;"}),
    "a circle of three": (
        CIRCLE,
        {"mid/leaf.rs": "use super::third::Third;", "mid/third.rs": "pub use super::other::other as Third;", "mid/mod.rs": "mod third;"},
    ),
    "a folder's own item in a child, and the child in the folder": (CIRCLE, {"mid/mod.rs": "pub struct Own;", "mid/other.rs": "use super::Own;"}),
    "a folder's own item in a child": ("of a module around this one", {"mid/mod.rs": "mod new;\npub struct Own;", "mid/new.rs": "use super::Own;"}),
    "what the crate's root defines": ("of a module around this one", {"lib.rs": "pub struct Root;", "low.rs": "use crate::Root;"}),
    "a module that uses another of its floor": ("do not use each other", {"each/b.rs": "use super::a::A;"}),
    "an unknown module": ("on no floor", {"lib.rs": "mod new;", "new.rs": ""}),
    "a path that leads nowhere": (NOWHERE, {"low.rs": "use crate::mid::Gone;"}),
    "a path in a macro's arguments that leads nowhere": (NOWHERE, {"low.rs": "theirs! { crate::mid::Gone }"}),
    "a path into a child that leads nowhere": (NOWHERE, {"mid/mod.rs": "fn f() { leaf::Gone }"}),
}


def self_test():
    """Ends with an error where a rule passes a planted violation, finds another in its place, or refuses what is right."""

    def found(files, page=PAGE, exceptions=()):
        with tempfile.TemporaryDirectory() as folder:
            for path in HOUSE.keys() | files.keys():
                file = pathlib.Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(HOUSE.get(path, "") + files.get(path, ""))
            return check(pathlib.Path(folder), page, "## The host side", "", dict.fromkeys(exceptions, "so"))[0]

    up = {"low.rs": "use crate::top::Top;"}
    for right in (({},), (up, PAGE, [("low.rs", "top.rs")]), (up, PAGE, [("low.rs", "*.rs")])):
        if problems := found(*right):
            raise SystemExit(f"refused what is right: {problems}")
    plants = {what: (message, (files,)) for what, (message, files) in PLANTS.items()}
    plants["a table that names what is not there"] = ("gone.rs, which is not there", ({}, PAGE.replace("`low.rs`", "`low.rs`, `gone.rs`")))
    swapped = PAGE.replace("| `low.rs` |", "| `-` |").replace("| `top.rs` | x", "| `low.rs` | x").replace("| `-` |", "| `top.rs` |")
    plants["a table in another order"] = (UP, ({}, swapped))
    plants["a page without a table"] = ("no table", ({}, "## The host side\n"))
    plants["an exception that is not needed"] = ("is not needed", ({}, PAGE, [("top.rs", "low.rs")]))
    plants["more than an exception says"] = (UP, ({"low.rs": "use crate::top::Top;\nuse crate::mid::Leaf;"}, PAGE, [("low.rs", "top.rs")]))
    for what, (message, plant) in plants.items():
        if not any(message in problem for problem in found(*plant)):
            raise SystemExit(f"passed {what}: {found(*plant)}")
        print(f"refused: {what}")


def main(arguments):
    match arguments:
        case ["check", root]:
            check_all(pathlib.Path(root))
        case ["self-test"]:
            self_test()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
