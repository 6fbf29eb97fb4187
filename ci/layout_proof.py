"""Proves what host/memory computes of places in an arena, over all 64-bit words, by Z3. For ci/layout.

    layout_proof.py prove            every claim holds for the model, ci/layout_model.py
    layout_proof.py self-test        each changed line of the model is refuted by a counterexample, and by a row
    layout_proof.py rows [FOLDER]    the digest of what the model gives for the arguments of host/memory/layout_rows.rs, a function a line;
                                     FOLDER gets the rows themselves

The model is tied to the Rust functions by rows: for multiples of the alignment, the words beside them, and as many below 2^64, Rust's test and
this file write what their function gives. Both must have the digests of host/memory/layout_rows.txt.

Invariant: the claims are stated in whole numbers, which do not wrap, and not by the model's own functions.
"""

import hashlib
import itertools
import pathlib
import sys
import types

import z3

TOP = 2**64 - 1
MODEL = pathlib.Path(__file__).parent / "layout_model.py"


def model_of(text):
    module = types.ModuleType("layout_model")
    exec(compile(text, MODEL, "exec"), vars(module))
    return module


class Nothing(Exception):
    """A Rust function gives `None`."""


class Wraps(Exception):
    """A `+`, `-` or `*` of Rust wraps."""


class Numbers:
    """The arithmetic of one run, on numbers."""

    path = staticmethod(lambda: True)
    any, all = staticmethod(lambda *parts: any(parts)), staticmethod(lambda *parts: all(parts))
    at_most, less = staticmethod(lambda a, b: a <= b), staticmethod(lambda a, b: a < b)
    rem, div = staticmethod(lambda a, b: a % b), staticmethod(lambda a, b: a // b)
    word = staticmethod(lambda number: number & TOP)

    def __init__(self):
        self.some = True

    def exact(self, number):
        if not 0 <= number <= TOP:
            raise Wraps
        return number

    def add(self, a, b):
        return self.exact(a + b)

    def sub(self, a, b):
        return self.exact(a - b)

    def mul(self, a, b):
        return self.exact(a * b)

    def checked_add(self, a, b):
        return a + b <= TOP, (a + b) & TOP

    def checked_sub(self, a, b):
        return a >= b, (a - b) & TOP

    def require(self, condition):
        if not condition:
            raise Nothing

    def pick(self, condition, yes, no):
        return yes if condition else no

    def within(self):
        return Attempt()


class Attempt(Numbers):
    """A part whose `None` is not that of the whole."""

    def require(self, condition):
        self.some = self.some and condition

    def path(self):
        return self.some


class Symbols:
    """The arithmetic of all runs at once, on whole numbers that a word can be. Remembers what must not wrap, and when it is computed."""

    any, all, pick = staticmethod(z3.Or), staticmethod(z3.And), staticmethod(z3.If)
    at_most, less = staticmethod(lambda a, b: a <= b), staticmethod(lambda a, b: a < b)
    rem, div = staticmethod(lambda a, b: a % b), staticmethod(lambda a, b: a / b)
    word = staticmethod(lambda number: z3.IntVal(number & TOP))

    def __init__(self):
        self.conditions, self.obligations = [], []

    def path(self):
        return z3.And(*self.conditions, True)

    def require(self, condition):
        self.conditions.append(condition)

    def within(self):
        inner = Symbols()
        inner.obligations = self.obligations
        return inner

    def exact(self, sign, number):
        self.obligations.append((f"`{sign}` does not wrap", z3.Implies(self.path(), z3.And(0 <= number, number <= TOP))))
        return number

    def add(self, a, b):
        return self.exact("+", a + b)

    def sub(self, a, b):
        return self.exact("-", a - b)

    def mul(self, a, b):
        return self.exact("*", a * b)

    def checked_add(self, a, b):
        return a + b <= TOP, (a + b) % (TOP + 1)

    def checked_sub(self, a, b):
        return a >= b, (a - b) % (TOP + 1)


def aligned(number):
    return number % 256 == 0


def up(number, to=256):
    """The next multiple, however large."""
    return (number + (to - 1)) / to * to


def at_most(*numbers):
    """Each at most the next."""
    return z3.And(*(a <= b for a, b in itertools.pairwise(numbers)))


class Claim:
    """Unknown words, what is known of them, and what must follow."""

    def __init__(self, model):
        self.model, self.m = model, Symbols()
        self.words, self.known, self.goals = {}, [], []

    def any(self, name):
        """Any word."""
        if name not in self.words:
            self.words[name] = z3.Int(name)
            self.known.append(at_most(0, self.words[name], TOP))
        return self.words[name]

    def bump(self, name, capacity=None):
        """Any state that keeps the invariant."""
        capacity = self.any("capacity") if capacity is None else capacity
        bump = self.model.Bump(capacity, self.any(f"{name}front"), self.any(f"{name}back"))
        self.known.append(self.sound(bump))
        return bump

    @staticmethod
    def sound(bump):
        front, back = bump.taken
        return z3.And(*map(aligned, (bump.capacity, front, back)), at_most(front + back, bump.capacity))

    def earlier(self, name, than):
        """A state from which takes lead to another."""
        bump = self.bump(name, than.capacity)
        self.known += [at_most(bump.taken[end], than.taken[end]) for end in (0, 1)]
        return bump

    def follows(self, what, goal, when_some=True):
        self.goals.append((what, z3.Implies(self.m.path(), goal) if when_some else goal))

    def prove(self):
        """What does not follow, with words for which it does not, or None."""
        for what, goal in self.goals + self.m.obligations:
            solver = z3.Solver()
            solver.set("timeout", 60_000)
            solver.add(*self.known, z3.Not(goal))
            outcome = solver.check()
            if outcome == z3.sat:
                found = solver.model()
                words = (f"{name} = {found.eval(word, model_completion=True).as_long()}" for name, word in self.words.items())
                return f"not so: {what}, where {', '.join(words)}"
            if outcome != z3.unsat:
                return f"not decided: {what}"
        return None


def padding(model):
    claim = Claim(model)
    size = claim.any("bytes")
    result = model.padded(claim.m, size)
    claim.follows("it is the next multiple", result == up(size))
    claim.follows("it is there where the multiple fits a word", claim.m.path() == at_most(up(size), TOP), False)
    return claim


def beginning(model):
    claim = Claim(model)
    capacity = claim.any("bytes")
    bump = model.new(claim.m, capacity)
    claim.follows("the invariant holds", claim.sound(bump))
    claim.follows("less than the alignment is lost", z3.And(at_most(bump.capacity, capacity), capacity - bump.capacity < 256))
    claim.follows("nothing is taken", model.taken(claim.m, bump) == 0)
    return claim


def taking(model, end):
    claim = Claim(model)
    bump, size, address = claim.bump(""), claim.any("bytes"), claim.any("address")
    claim.known.append(at_most(address + bump.capacity, TOP))
    offset, after = model.take(claim.m, bump, end, size)
    front, back = bump.taken
    low, high = offset, offset + up(size)
    claim.follows("it is aligned", aligned(offset))
    claim.follows("it lies between what is taken from either end", at_most(front, low, high, bump.capacity - back))
    claim.follows("the invariant holds after it", claim.sound(after))
    claim.follows("it alone is taken more", z3.And(after.taken[end] == bump.taken[end] + up(size), after.taken[1 - end] == bump.taken[1 - end]))
    claim.follows("its address does not wrap", claim.m.add(address, offset) + up(size) == address + high)
    claim.follows("it is there where there is room", claim.m.path() == at_most(front + back + up(size), bump.capacity), False)
    return claim


def seeing_since(model):
    claim = Claim(model)
    now = claim.bump("")
    mark = claim.earlier("mark ", now)
    (low, low_bytes), (high, high_bytes) = model.since(claim.m, now, mark)
    claim.follows("from the front it is what came after the mark", z3.And(low == mark.taken[0], low + low_bytes == now.taken[0]))
    claim.follows("from the back too", z3.And(high == now.capacity - now.taken[1], high + high_bytes == now.capacity - mark.taken[1]))
    claim.follows("the two are apart", at_most(low + low_bytes, high))
    return claim


def ending_a_scope(model):
    claim = Claim(model)
    now = claim.bump("")
    until = claim.earlier("until ", now)
    mark = claim.earlier("mark ", until)
    claim.known += [z3.Or(mark.taken[end] == until.taken[end], until.taken[end] == now.taken[end]) for end in (0, 1)]
    left = model.without(claim.m, now, mark, until)
    claim.follows("the invariant holds", claim.sound(left))
    for end in (0, 1):
        gone = until.taken[end] - mark.taken[end]
        claim.follows("what the scope took is gone, and no more", left.taken[end] == now.taken[end] - gone)
        kept = z3.If(mark.taken[end] == until.taken[end], now.taken[end], mark.taken[end])
        claim.follows("what stays lies where it lay", left.taken[end] == kept)
    return claim


def reserving(model):
    claim = Claim(model)
    # Live sections lie from `limit` on, and have `sum` bytes together.
    capacity, limit, size, total = map(claim.any, ("capacity", "limit", "bytes", "sum"))
    claim.known += [at_most(limit, capacity), at_most(total, capacity - limit)]
    start = model.reserve(claim.m, limit, size)
    claim.follows("it is aligned", aligned(start))
    claim.follows("it ends where the first live section starts, or before", at_most(start + size, limit))
    claim.follows("less than the alignment is lost", limit - start - size < 256)
    claim.follows("the sum of all is as small as their place", at_most(claim.m.add(total, size), capacity - start))
    claim.follows("a step's memory ends before it", at_most(model.new(claim.m, start).capacity, start))
    claim.follows("it is there where there is room", claim.m.path() == at_most(size, limit), False)
    return claim


def giving_back(model, end):
    claim = Claim(model)
    now = claim.bump("")
    start = claim.earlier("start ", now)
    first, behind = map(claim.any, ("block ", "behind "))
    own = model.gives(claim.m, now, start, end, (first, behind))
    edge, front = now.capacity, end == 0
    low = start.taken[0] if front else edge - now.taken[1]
    high = now.taken[0] if front else edge - start.taken[1]
    inside = z3.And(at_most(low, first), first < behind, at_most(behind, high))
    claim.follows("it is the scope's own, or is refused", own == inside)
    # So it goes with the scope, and no take meets it before.
    offset, _ = model.take(claim.m, now, end, claim.any("bytes"))
    apart = at_most(high, offset) if front else at_most(offset + up(claim.words["bytes"]), low)
    claim.follows("the next take does not meet it", z3.Implies(own, apart))
    return claim


def taking_again(model):
    claim = Claim(model)
    length, size = claim.any("length"), claim.any("bytes")
    chosen = model.fits_exactly(claim.m, length, size)
    claim.follows("a block has the bytes that are asked for, and no spare multiple", chosen == (length == up(size)))
    return claim


def guarding(model):
    claim = Claim(model)
    size, guard = claim.any("bytes"), claim.m.word(model.GUARD)
    total = model.guarded(claim.m, size, guard)
    fits = at_most(up(size) + guard, TOP)
    claim.follows("the guard lies behind the tensor's last multiple", z3.Implies(fits, total == up(size) + guard))
    claim.follows("what fits no word is more than any arena has", z3.Implies(z3.Not(fits), up(total) > TOP))
    return claim


def growing(model):
    claim = Claim(model)
    needed, limit = claim.any("needed"), claim.any("limit")
    wanted = model.grown(claim.m, needed, limit)
    claim.follows("it is at most the limit", at_most(wanted, limit))
    claim.follows("it is what is needed, or the limit", z3.Or(at_most(needed, wanted), wanted == limit))
    claim.follows("it is whole pages, or the limit", z3.Or(wanted == up(needed, model.GROWTH), wanted == limit))
    return claim


CLAIMS = {
    "padded": padding,
    "Bump::new": beginning,
    "Bump::take, from the front": lambda model: taking(model, 0),
    "Bump::take, from the back": lambda model: taking(model, 1),
    "Bump::since": seeing_since,
    "Bump::without": ending_a_scope,
    "Sections::reserve": reserving,
    "Reuse::give, at the front": lambda model: giving_back(model, 0),
    "Reuse::give, at the back": lambda model: giving_back(model, 1),
    "Reuse::take": taking_again,
    "guarded": guarding,
    "grown": growing,
}

# What host/memory/layout_rows.rs has too, in the same order.
SMALL = [number for unit in range(5) for number in (256 * unit - 1, 256 * unit, 256 * unit + 1) if number >= 0]
WORDS = SMALL + [TOP - number for number in SMALL]
CAPACITIES = [0, 256, 512, 768, 1024, TOP - 255]


def states(capacity):
    """Every (front, back) of some multiples that fit."""
    last = capacity // 256
    units = [unit for unit in range(last + 1) if unit <= 4] if last <= 4 else [0, 1, 2, 3, 4, last - 1, last]
    return [(256 * front, 256 * back) for front in units for back in units if front + back <= last]


def between(capacity, low, high):
    """The states from one to another."""
    return [state for state in states(capacity) if all(a <= b <= c for a, b, c in zip(low, state, high))]


def attempt(run):
    try:
        return run(Numbers())
    except Nothing:
        return "none"
    except Wraps:
        return "wraps"


def text(value):
    """A value as its row has it."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows(model):
    """{function: its rows, one after the other}"""

    def edges(m, bump):
        return [bump.taken[0], m.sub(bump.capacity, bump.taken[1])]

    def taken(m, bump, end, size):
        offset, after = model.take(m, bump, end, size)
        return [offset, *edges(m, after)]

    found = {name: [] for name in ("padded", "new", "take", "since", "without", "reserve", "give", "again", "guarded", "grown")}

    def row(name, arguments, run):
        found[name].append(f"{text(arguments)}: {text(attempt(run))}\n")

    for size in WORDS:
        row("padded", [size], lambda m: model.padded(m, size))
        row("new", [size], lambda m: edges(m, model.new(m, size)))
        row("guarded", [size], lambda m: model.guarded(m, size, model.GUARD))
        for limit in WORDS:
            row("grown", [size, limit], lambda m: model.grown(m, size, limit))
            row("reserve", [limit, size], lambda m: model.reserve(m, limit, size))
        for length in (256, 512, 768, 1024):
            row("again", [length, size], lambda m: model.fits_exactly(m, length, size))
    for capacity in CAPACITIES:
        for state in states(capacity):
            now = model.Bump(capacity, *state)
            for end, size in itertools.product((0, 1), WORDS):
                row("take", [capacity, state, end, size], lambda m: taken(m, now, end, size))
            for low in between(capacity, (0, 0), state):
                mark = model.Bump(capacity, *low)
                row("since", [capacity, state, low], lambda m: model.since(m, now, mark))
                for high in between(capacity, low, state):
                    if all(a == b or b == c for a, b, c in zip(low, high, state)):
                        until = model.Bump(capacity, *high)
                        row("without", [capacity, state, low, high], lambda m: edges(m, model.without(m, now, mark, until)))
    capacity, blocks = 768, [*SMALL, TOP - 255, TOP]
    for state in states(capacity):
        now = model.Bump(capacity, *state)
        for low in between(capacity, (0, 0), state):
            start = model.Bump(capacity, *low)
            for end, first, behind in itertools.product((0, 1), blocks, blocks):
                row("give", [state, low, end, first, behind], lambda m: model.gives(m, now, start, end, (first, behind)))
    return {name: "".join(lines) for name, lines in found.items()}


def digests(rows):
    return [f"{name} {lines.count(chr(10))} {hashlib.sha256(lines.encode()).hexdigest()}" for name, lines in rows.items()]


# A line of the model, changed by little: what it breaks, before, after.
PLANTS = [
    ("padding from two bytes on", "m.pick(rest == 0, number, above)", "m.pick(m.at_most(rest, 1), number, above)"),
    ("padding that wraps", "m.require(m.any(rest == 0, fits))", "m.require(m.any(rest == 0, rest != 0))"),
    ("a capacity that is rounded up", "m.mul(m.div(capacity, ALIGN), ALIGN)", "m.mul(m.div(m.checked_add(capacity, 255)[1], ALIGN), ALIGN)"),
    ("a multiple too many", "m.at_most(total, bump.capacity)", "m.at_most(total, m.checked_add(bump.capacity, ALIGN)[1])"),
    ("the last multiple is never taken", "m.at_most(total, bump.capacity)", "m.less(total, bump.capacity)"),
    ("room is counted with words that wrap", "    m.require(fits)\n    m.require(m.at_most(total", "    m.require(m.at_most(total"),
    ("a take from the back that starts where the last did", "m.sub(bump.capacity, after.taken[end])", "m.sub(bump.capacity, before)"),
    ("the back's part from the mark", "m.sub(bump.capacity, bump.taken[BACK])]", "m.sub(bump.capacity, mark.taken[BACK])]"),
    ("a scope that takes the one around with it", "m.add(m.sub(bump.taken[end], until.taken[end]), mark.taken[end])", "m.sub(bump.taken[end], until.taken[end])"),
    ("a section that is rounded up", "return m.mul(m.div(start, ALIGN), ALIGN)", "return m.mul(m.div(m.checked_add(start, 255)[1], ALIGN), ALIGN)"),
    ("a block that reaches one byte too far", "m.at_most(behind, m.add(offset, size))", "m.at_most(behind, m.checked_add(m.add(offset, size), 1)[1])"),
    ("a block of no bytes", "m.less(first, behind)", "m.at_most(first, behind)"),
    ("a larger block", "return length == padded(m, size)", "return m.at_most(padded(m, size), length)"),
    ("a guard inside the tensor's last multiple", "    size = padded(inner, size)\n", ""),
    ("growth beyond the limit", "m.pick(m.at_most(wanted, limit), wanted, limit)", "wanted"),
]


def refuted(model):
    """The first claim that does not hold, or None."""
    for name, claim in CLAIMS.items():
        if fault := claim(model).prove():
            return f"{name}: {fault}"
    return None


def self_test():
    source = MODEL.read_text()
    right = digests(rows(model_of(source)))
    for what, before, after in PLANTS:
        if source.count(before) != 1:
            raise SystemExit(f"{what}: the model has the line {source.count(before)} times")
        model = model_of(source.replace(before, after))
        fault = refuted(model)
        if not fault or "not so" not in fault:
            raise SystemExit(f"passed: {what}: {fault}")
        if digests(rows(model)) == right:
            raise SystemExit(f"no row tells: {what}")
        print(f"refuted: {what}\n    {fault}")
    print(f"{len(PLANTS)} changed lines, each refuted, and each in the rows")


def main(arguments):
    match arguments:
        case ["prove"]:
            model = model_of(MODEL.read_text())
            for name, claim in CLAIMS.items():
                made = claim(model)
                if fault := made.prove():
                    raise SystemExit(f"{name}: {fault}")
                print(f"{name}: {len(made.goals)} properties, {len(made.m.obligations)} operations that do not wrap")
        case ["rows", *folder] if len(folder) < 2:
            found = rows(model_of(MODEL.read_text()))
            for name, lines in found.items() if folder else ():
                (pathlib.Path(folder[0]) / name).write_text(lines)
            print("\n".join(digests(found)))
        case ["self-test"]:
            self_test()
        case _:
            raise SystemExit(__doc__)


main(sys.argv[1:])
