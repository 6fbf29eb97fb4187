"""What host/memory computes of places in an arena, once more, for ci/layout_proof.py: statement by statement as the Rust functions.

A machine `m` does the arithmetic, on numbers or on symbols. `m.add` and `m.sub` are Rust's `+` and `-`, which must not wrap; `m.require` is
`?` and an early `return None`. ci/layout changes lines of this file and wants each change found.
"""

ALIGN = 256
GUARD = 256
GROWTH = 2 << 20
FRONT, BACK = 0, 1


class Bump:
    """layout.rs, `Bump`."""

    def __init__(self, capacity, front, back):
        self.capacity, self.taken = capacity, [front, back]


def next_multiple(m, number, of):
    """`checked_next_multiple_of`."""
    rest = m.rem(number, of)
    fits, above = m.checked_add(number, m.sub(of, rest))
    m.require(m.any(rest == 0, fits))
    return m.pick(rest == 0, number, above)


def padded(m, size):
    return next_multiple(m, size, ALIGN)


def new(m, capacity):
    return Bump(m.mul(m.div(capacity, ALIGN), ALIGN), m.word(0), m.word(0))


def taken(m, bump):
    return m.add(bump.taken[FRONT], bump.taken[BACK])


def take(m, bump, end, size):
    """(offset, the state after)"""
    size = padded(m, size)
    fits, total = m.checked_add(taken(m, bump), size)
    m.require(fits)
    m.require(m.at_most(total, bump.capacity))
    before = bump.taken[end]
    after = Bump(bump.capacity, *bump.taken)
    after.taken[end] = m.add(before, size)
    return (before if end == FRONT else m.sub(bump.capacity, after.taken[end])), after


def since(m, bump, mark):
    """[(offset, bytes)] of either end"""
    offsets = [mark.taken[FRONT], m.sub(bump.capacity, bump.taken[BACK])]
    return [(offsets[end], m.sub(bump.taken[end], mark.taken[end])) for end in (FRONT, BACK)]


def without(m, bump, mark, until):
    left = [m.add(m.sub(bump.taken[end], until.taken[end]), mark.taken[end]) for end in (FRONT, BACK)]
    return Bump(bump.capacity, *left)


def guarded(m, size, guard):
    """What a tensor of checked mode takes: itself and its guard; the largest number where that is none."""
    inner = m.within()
    size = padded(inner, size)
    fits, total = inner.checked_add(size, guard)
    inner.require(fits)
    return m.pick(inner.path(), total, m.word(-1))


def grown(m, needed, limit):
    inner = m.within()
    wanted = next_multiple(inner, needed, GROWTH)
    wanted = m.pick(inner.path(), wanted, m.word(-1))
    return m.pick(m.at_most(wanted, limit), wanted, limit)


def reserve(m, limit, size):
    """sections.rs, `Sections::reserve`: where the section starts, which is the limit after."""
    fits, start = m.checked_sub(limit, size)
    m.require(fits)
    return m.mul(m.div(start, ALIGN), ALIGN)


def gives(m, now, start, end, block):
    """reuse.rs, `Reuse::give`: whether a block is the running scope's own."""
    offset, size = since(m, now, start)[end]
    first, behind = block
    return m.all(m.less(first, behind), m.at_most(offset, first), m.at_most(behind, m.add(offset, size)))


def fits_exactly(m, length, size):
    """reuse.rs, `Reuse::take`: whether a block of this length is handed out for so many bytes."""
    return length == padded(m, size)
