"""Counts registers, and instructions by kind, of the assembled kernels, for the cost model.

    code.py PTXAS NVDISASM FOLDER    prints the counts for each FOLDER/ARCH.ptx

`cargo xtask generate code` compiles the kernels and writes `code.json` with this. Each kernel has these
parts:

- `hot`: one iteration of its hot loop. Among loops that contain no other multiplying loop, this is
  the one with the most matrix instructions, else with the most multiply-adds. A loop that only
  repeats other work is none: see `only_repeats`.
- `copy`: the loop's other instructions per copy to shared memory, if not every iteration copies.
- `first`: one iteration of the loop before it, which copies a product's first stages.
- `last`: the loop after it, which multiplies the last stages, possibly unrolled.
- `tail`: one iteration of the loop after it, which stores the sums.
- `way`: the path from the first instruction to the end, with one iteration of the hot loop and one
  of the loop of the first stages. It is the shortest path through all multiplies and those copies.
- `ahead`: for each loop of a product's stages, its multiplies, and those before its barrier.

Each part counts, besides the kinds of instructions:

- `conflicts`: multiply-adds that read two registers of one bank (even or odd), not counting the
  operand that `.reuse` keeps. Each takes one more cycle.
- `alone`: the cycles of an undisturbed warp if memory reads took no time.
- `memory`: the number of successive waits for memory.
"""

import collections
import heapq
import json
import pathlib
import re
import subprocess
import sys
import tempfile

KINDS = {
    "mma": {"HMMA"},
    "fma": {"FFMA", "FADD", "FMUL"},
    "special": {"MUFU", "F2I", "I2F", "F2F", "FRND", "POPC", "FLO"},
    "shared": {"LDS", "LDSM", "STS"},
    "copies": {"LDGSTS"},
    "loads": {"LDG"},
    "stores": {"STG"},
    "shuffles": {"SHFL"},
    "barriers": {"BAR"},
}

# For instructions of variable latency: cycles until the result is usable (shared memory, the
# shortest, takes about 30), and until the operands have been read.
LATENCY, OPERANDS = 30, 10
# A latency larger than everything else in a kernel.
FAR = 1_000_000


def operation(text):
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


def parse(listing):
    """Returns {kernel: [(labels, text, control bits)]}. Each instruction has two hexadecimal
    lines."""
    kernels, current, labels = {}, None, []
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            current, labels = kernels.setdefault(match.group(1), []), []
        elif line.startswith("//----"):
            current = None
        elif current is None:
            continue
        elif match := re.match(r"(\.L_x_\d+):", line):
            labels.append(match.group(1))
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);\s+/\* 0x[0-9a-f]+ \*/", line):
            current.append([labels, match.group(1).strip(), None])
            labels = []
        elif (match := re.match(r"\s+/\* 0x([0-9a-f]+) \*/", line)) and current and current[-1][2] is None:
            current[-1][2] = int(match.group(1), 16)
    return kernels


def conflicts(instructions):
    found, kept = 0, {}
    for _, text, _ in instructions:
        if operation(text) != "FFMA":
            kept = {}
            continue
        operands = re.sub(r"^@!?U?P\w+\s+", "", text).split(None, 1)[1].split(",")[1:]
        read, keep = set(), {}
        for slot, operand in enumerate(operands):
            if match := re.match(r"\s*-?\|?R(\d+)(\.reuse)?", operand):
                register = int(match.group(1))
                if kept.get(slot) != register:
                    read.add(register)
                if match.group(2):
                    keep[slot] = register
        kept = keep
        found += max(sum(1 for register in read if register % 2 == bank) for bank in (0, 1)) > 1
    return found


def alone(instructions, memory):
    """Returns the cycles of a lone warp if a memory read takes `memory` cycles.

    Simulates the assembler's stall counts and its six dependency barriers.
    """
    now, ready = 0, [0] * 6
    for _, text, control in instructions:
        bits = control >> 41
        stall, written, read, waits = bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
        now = max([now, *(ready[barrier] for barrier in range(6) if waits >> barrier & 1)])
        latency = memory if operation(text) == "LDG" else LATENCY
        if written < 6:
            ready[written] = max(ready[written], now + latency)
        if read < 6:
            ready[read] = max(ready[read], now + OPERANDS)
        now += max(stall, 1)
    return now


def count(instructions):
    kinds = collections.Counter()
    for _, text, _ in instructions:
        name = operation(text)
        kinds.update(kind for kind, names in KINDS.items() if name in names)
    found = {"all": len(instructions), **dict(sorted(kinds.items())), "conflicts": conflicts(instructions)}
    found["alone"] = alone(instructions, 0)
    found["memory"] = (alone(instructions, FAR) - found["alone"] + FAR // 2) // FAR
    return {kind: number for kind, number in found.items() if number}


def target(text):
    match = re.search(r"BRA(?:\.\w+)*\s.*?(\.L_x_\d+)", text)
    return match and match.group(1)


def ends_path(text):
    """True if the next instruction does not follow: after a jump, an exit, a return, and a call of
    a panic, which does not return."""
    return re.match(r"BRA `|EXIT|RET\b|CALL\b.*panicking", text)


def blocks_of(instructions):
    """Returns the basic blocks [(first, end)], and the set of successors of each."""
    places = {label: at for at, (labels, _, _) in enumerate(instructions) for label in labels}
    last = len(instructions)
    jumps = {at: places.get(target(text)) for at, (_, text, _) in enumerate(instructions) if target(text)}
    is_exit = lambda text: "EXIT" in text or ends_path(text)
    exits = {at + 1 for at, (_, text, _) in enumerate(instructions) if is_exit(text) and at + 1 < last}
    starts = sorted({0, last, *places.values(), *exits, *(at + 1 for at in jumps if at + 1 < last)})
    blocks = list(zip(starts, starts[1:]))
    number = {start: at for at, (start, _) in enumerate(blocks)}
    follows = []
    for start, end in blocks:
        to = jumps.get(end - 1)
        always = ends_path(instructions[end - 1][1])
        follows.append({number[to]} if to is not None else set())
        if end < last and not always:
            follows[-1].add(number[end])
    return blocks, follows


def way_through(blocks, follows, goals, first=0):
    """Returns the shortest path from block `first` through the goals in order.

    A goal is a set of blocks, any of which reaches it. The path never reenters `first`.
    """
    way = [first]
    length = lambda at: blocks[at][1] - blocks[at][0]
    for goal in goals:
        # Dijkstra's algorithm.
        seen, queue = set(), [(0, [way[-1]])]
        while queue and queue[0][1][-1] not in goal:
            so_far, path = heapq.heappop(queue)
            if path[-1] not in seen:
                seen.add(path[-1])
                for to in follows[path[-1]] - seen - {first}:
                    heapq.heappush(queue, (so_far + length(to), [*path, to]))
        if queue:
            way += queue[0][1][1:]
    return way


def dominators(follows):
    """Returns, for each block, the blocks on every path to it, as the bits of a number."""
    before = [[] for _ in follows]
    for at, successors in enumerate(follows):
        for to in successors:
            before[to].append(at)
    everything = (1 << len(follows)) - 1
    found = [1] + [everything] * (len(follows) - 1)
    changed = True
    while changed:
        changed = False
        for at in range(1, len(follows)):
            shared = everything
            for other in before[at]:
                shared &= found[other]
            if found[at] != shared | 1 << at:
                found[at], changed = shared | 1 << at, True
    return found


def loops_of(instructions):
    """Returns [(first, last)] of the loops.

    A jump back makes a loop if every path to it passes its target. The code that follows a kernel's
    last exit handles diverged warps, and jumps back into the kernel without a loop.
    """
    places = {label: at for at, (labels, _, _) in enumerate(instructions) for label in labels}
    blocks, follows = blocks_of(instructions)
    first = {start: number for number, (start, _) in enumerate(blocks)}
    last = {end - 1: number for number, (_, end) in enumerate(blocks)}
    found = dominators(follows)
    ends = {}
    for at, (_, text, _) in enumerate(instructions):
        start = places.get(target(text), at)
        if start < at and found[last[at]] >> first[start] & 1:
            ends[start] = max(ends.get(start, 0), at)
    return list(ends.items())


def within(inner, outer):
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def only_repeats(instructions, loop, loops):
    """True for a loop that reads no memory itself and contains a whole reduction between lanes, as
    a loop or as several shuffles. It is the second pass over a row whose squares overflow, which
    hardly any row has."""
    inner = [other for other in loops if within(other, loop)]
    own = [at for at in range(loop[0], loop[1] + 1) if not any(first <= at <= last for first, last in inner)]
    names = [operation(instructions[at][1]) for at in own]
    reads = KINDS["loads"] | KINDS["shared"] | KINDS["copies"]
    return not reads & set(names) and (bool(inner) or names.count("SHFL") > 1)


def hot_loop(instructions, all_loops):
    loops = {
        loop: count(instructions[loop[0] : loop[1] + 1])
        for loop in all_loops
        if not only_repeats(instructions, loop, all_loops)
    }
    kind = "mma" if any("mma" in kinds for kinds in loops.values()) else "fma"
    multiplies = lambda loop: loops[loop].get(kind, 0)
    leaves = [
        loop
        for loop in loops
        if multiplies(loop) and not any(within(other, loop) and multiplies(other) >= 32 for other in loops)
    ]
    # An activation after a product may have more multiplies than an iteration of the product, but
    # it does not read shared memory. A product copies its operands.
    is_product = any("copies" in kinds for kinds in loops.values())
    reads = lambda loop: is_product and loops[loop].get("shared", 0) >= 16
    # The last iterations, with nothing left to copy, form a separate loop, possibly unrolled.
    copies = lambda loop: loops[loop].get("copies", 0) > 0
    preferred = copies if kind == "mma" else reads
    order = lambda loop: (preferred(loop), multiplies(loop), copies(loop), -loop[1] + loop[0])
    return max(leaves, key=order, default=None)


def ahead(instructions, loops):
    """Returns, for each loop that copies and multiplies stages on tensor cores, [all mma, mma
    before its barrier]."""
    found = []
    for first, last in sorted(loops):
        names = [operation(text) for _, text, _ in instructions[first : last + 1]]
        kinds = lambda names: sum(name in KINDS["mma"] for name in names)
        if kinds(names) and "LDGSTS" in names and names.count("BAR") == 1:
            found.append([kinds(names), kinds(names[: names.index("BAR")])])
    return found


def code(registers, instructions):
    """Returns the counts of a kernel."""
    blocks, follows = blocks_of(instructions)
    take = lambda way: [instruction for at in way for instruction in instructions[slice(*blocks[at])]]
    weight = lambda at: sum(count(take([at])).get(kind, 0) for kind in ("mma", "fma"))
    all_loops = loops_of(instructions)
    loop = hot_loop(instructions, all_loops)
    start, end = (loop[0], loop[1] + 1) if loop else (0, len(instructions))
    inside = [at for at, (first, last) in enumerate(blocks) if start <= first and last <= end]
    most = max(map(weight, inside), default=0)
    goals = [{at} for at in inside if most and 2 * weight(at) >= most]
    if not loop and any("HMMA" in text for _, text, _ in instructions):
        raise SystemExit("no loop of matrix instructions was found in a kernel that has them")
    found = {"registers": registers}
    if loop:
        turn = way_through(blocks, follows, [*goals, {inside[-1]}], inside[0])
        found["hot"] = count(take(turn))
        whole = count(instructions[start:end])
        if whole.get("copies") and not found["hot"].get("copies"):
            found["copy"] = round((whole["all"] - found["hot"]["all"]) / whole["copies"], 1)
        goals = [{at} for at in turn]
        # A product's first stages may be copied by the nearest loop before it, one stage per
        # iteration. The block with the most copies handles whole tiles. An inner loop checks each
        # chunk of a tile that extends beyond the operand.
        kinds = lambda loop: count(instructions[loop[0] : loop[1] + 1])
        is_first = lambda loop: loop[1] < start and "copies" in kinds(loop) and "mma" not in kinds(loop)
        firsts = [loop for loop in all_loops if is_first(loop)] if "mma" in found["hot"] else []
        first = max((loop for loop in firsts if not any(within(loop, other) for other in firsts)), default=None)
        if first:
            inner = [at for at, (begin, last) in enumerate(blocks) if first[0] <= begin and last <= first[1] + 1]
            copies = lambda at: count(take([at])).get("copies", 0)
            begins = [{at} for at in inner if copies(at) and 2 * copies(at) >= max(map(copies, inner))]
            found["first"] = count(take(way_through(blocks, follows, [*begins, {inner[-1]}], inner[0])))
            goals = [*begins, *goals]
        is_last = lambda loop: loop[0] >= end and "mma" in kinds(loop) and "copies" not in kinds(loop)
        last = min(filter(is_last, all_loops), default=None) if first else None
        if last:
            found["last"] = count(instructions[last[0] : last[1] + 1])
    if loops := ahead(instructions, all_loops):
        found["ahead"] = loops
    exits = {at for at, (_, last) in enumerate(blocks) if re.match("EXIT", instructions[last - 1][1])}
    found["way"] = count(take(way_through(blocks, follows, [*goals, exits])))
    # A later loop stores the sums, a few outputs per iteration. If the straight path already stores
    # everything, only partial tiles need that loop.
    stores = lambda at: count(take([at])).get("stores", 0)
    later = [loop for loop in all_loops if loop[0] >= end]
    tail = max(later, key=lambda loop: loop[1] - loop[0], default=None)
    if loop and tail and not ("mma" in found["hot"] and "stores" in found["way"]):
        inner = [at for at, (first, last) in enumerate(blocks) if tail[0] <= first and last <= tail[1] + 1]
        most = max(map(stores, inner))
        if most:
            goals_of_tail = [{at for at in inner if stores(at) == most}, {inner[-1]}]
            found["tail"] = count(take(way_through(blocks, follows, goals_of_tail, inner[0])))
    return found


def main(ptxas, nvdisasm, folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.ptx")):
        with tempfile.TemporaryDirectory() as scratch:
            binary = pathlib.Path(scratch) / "kernels.cubin"
            run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True)
            log = run(ptxas, f"-arch={path.stem}", "-v", path, "-o", binary).stderr
            listing = run(nvdisasm, "-c", "-hex", binary).stdout
        registers = dict(re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, flags=re.S))
        kernels = parse(listing)
        if not kernels or set(kernels) - set(registers):
            raise SystemExit(f"{path}: kernels without registers: {sorted(set(kernels) - set(registers))}")
        found[path.stem] = {
            name: code(int(registers[name]), body) for name, body in sorted(kernels.items())
        }
    lines = [
        f' "{arch}": {{\n' + ",\n".join(f'  "{name}": {json.dumps(found)}' for name, found in kernels.items()) + "\n }"
        for arch, kernels in found.items()
    ]
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(*sys.argv[1:])
