"""Estimates what a lane keeps in registers, from a kernel in LLVM's language with everything inlined.

The estimate is the largest number of fp32 values that are alive at one place. It leaves out addresses and counters,
which a compiler can compute again, and it takes instructions in LLVM's order, which a GPU's compiler changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_VALUE = re.compile(r"%[-\w.$]+")
_ARRAY = re.compile(r"(%[-\w.$]+) = alloca (.*?), align")
_WIDE = re.compile(r"<(\d+) x float>")


def stack_arrays(lowered: str) -> list[str]:
    """Return the types of arrays that an index chosen at run time keeps out of registers.

    LLVM splits an array that has constant indices alone; a piece of one (its name says so) is no array.
    """
    return [kind for name, kind in _ARRAY.findall(lowered) if ".sroa." not in name]


def _floats(instruction: str) -> int:
    """How many fp32 values an instruction gives."""
    _, _, operation = instruction.partition(" = ")
    operation = re.sub(r"^(?:tail |musttail |notail )?", "", operation)
    word = operation.split(" ", 1)[0]
    if word in ("alloca", "getelementptr", "icmp", "fcmp", "addrspacecast"):
        return 0
    if " to " in operation and word in ("bitcast", "fpext", "fptrunc", "sitofp", "uitofp", "trunc", "zext", "sext"):
        kind = operation.rsplit(" to ", 1)[1]
    elif word == "extractelement":
        kind = "float" if " x float>" in operation else ""
    elif word == "select":
        kind = operation.split(",", 1)[1].strip()
    else:
        kind = re.sub(r"^(?:(?:nnan|ninf|nsz|arcp|contract|afn|reassoc|fast|noundef|nofpclass\(\w+\)|spir_func) )*", "",
                      operation.split(" ", 1)[1])  # fmt: skip
    wide = _WIDE.match(kind)
    return int(wide[1]) if wide else int(bool(re.match(r"float\b", kind)))


class _Block:
    def __init__(self) -> None:
        self.instructions: list[tuple[str | None, int, list[str]]] = []
        # What comes in from which block: (own name, floats, value, block).
        self.incoming: list[tuple[str, int, list[tuple[str, str]]]] = []
        self.next: list[str] = []


def _blocks(lowered: str) -> dict[str, _Block]:
    body = lowered[re.search(r"^define .*@launched\(.*\{$", lowered, re.MULTILINE).end() :]  # type: ignore[union-attr]
    blocks, current = {}, _Block()
    blocks["%entry"] = current
    for line in body[: body.index("\n}")].splitlines():
        line = re.sub(r"(, ![-\w.]+ ![-\w.]+)+| #\d+$", "", line).strip()
        label = re.match(r'^([-\w.$]+|"[^"]*"):', line)
        if label:
            current = blocks.setdefault(f"%{label[1]}", _Block())
        elif " = phi " in line:
            name = line.split(" ", 1)[0]
            pairs = re.findall(r"\[ ([^,]+), (%[-\w.$]+) \]", line)
            current.incoming.append((name, _floats(line), pairs))
        elif line:
            name = line.split(" = ", 1)[0] if re.match(r"%[-\w.$]+ = ", line) else None
            current.instructions.append((name, _floats(line) if name else 0, _VALUE.findall(line)[bool(name) :]))
            if re.match(r"(br|switch|\]|i32 )", line):
                current.next += re.findall(r"label (%[-\w.$]+)", line)
    return blocks


def live_floats(lowered: str) -> int:
    """Return the largest number of fp32 values that are alive at one place, pieces of split arrays among them."""
    pieces = [re.match(r"[<\[](\d+) x float", kind) for name, kind in _ARRAY.findall(lowered) if ".sroa." in name]
    blocks = _blocks(lowered)
    sizes = {name: size for name, size in _named(blocks) if size}
    live_in: dict[str, set[str]] = {label: set() for label in blocks}
    changed, most = True, 0
    while changed:
        changed = False
        for label, block in reversed(blocks.items()):
            alive, peak = _backwards(label, block, blocks, live_in, sizes)
            most = max(most, peak)
            if alive != live_in[label]:
                live_in[label], changed = alive, True
    return most + sum(int(piece[1]) for piece in pieces if piece)


def _named(blocks: dict[str, _Block]) -> Iterator[tuple[str, int]]:
    for block in blocks.values():
        yield from ((name, size) for name, size, _ in block.incoming)
        yield from ((name, size) for name, size, _ in block.instructions if name)


def _backwards(
    label: str, block: _Block, blocks: dict[str, _Block], live_in: dict[str, set[str]], sizes: dict[str, int]
) -> tuple[set[str], int]:
    """Return what is alive at the start of a block, and the most within it, from what is at its followers' starts."""
    alive: set[str] = set()
    for follower in block.next:
        alive |= live_in[follower] - {name for name, _, _ in blocks[follower].incoming}
        alive |= {
            x for _, _, pairs in blocks[follower].incoming for x, origin in pairs if origin == label and x in sizes
        }
    count = peak = sum(sizes[name] for name in alive)
    for name, size, used in reversed(block.instructions):
        if name in alive:
            alive.discard(name)
            count -= size
        for each in used:
            if each in sizes and each not in alive:
                alive.add(each)
                count += sizes[each]
        peak = max(peak, count)
    return alive | {name for name, size, _ in block.incoming if size and name in alive}, peak
