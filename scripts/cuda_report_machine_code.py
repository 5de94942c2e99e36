"""Reads what `nvdisasm -c` prints: the loops of each kernel, and the accesses to global and local memory in them.

A *loop* is a natural loop of the control-flow graph. A *main loop* has accesses of 16 bytes of its own, and no loop inside it has any. Of a main
loop, the accesses count that can share a turn with one of 16 bytes: a path leads from one to the other without going back to the loop's start.
Loops and branches for single elements (before the first aligned address, after the last whole pack, for unaligned tensors) share no turn with
16 bytes, and do not count.
"""
import re
from collections import Counter, defaultdict

WIDE = 16
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
JUMPS = ("BRA", "EXIT", "RET", "BRX", "JMP")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Instruction:
    def __init__(self, guard, name, operands):
        self.guard, self.name, self.operands = guard, name, operands
        self.kind = name.split(".")[0]
        self.label = match[1] if (match := re.search(r"`\((\S+)\)", operands)) else None

    def access(self):
        """("loads" or "stores", bytes) of a global access; LD and ST are those whose address space the
        compiler does not know."""
        kind = {"LDG": "loads", "LD": "loads", "LDGSTS": "loads", "STG": "stores", "ST": "stores"}.get(self.kind)
        width = next((WIDTHS[part] for part in self.name.split(".")[1:] if part in WIDTHS), 4)
        return (kind, width) if kind else None

    def is_local(self):
        return self.kind in ("LDL", "STL")

    def always_jumps(self):
        plain = self.operands.startswith("`") and "DIV" not in self.name or self.kind != "BRA"
        return self.guard is None and self.kind in JUMPS and plain


def functions(text):
    """name -> lines of each kernel."""
    result, lines = {}, None
    for line in text.split("\n"):
        if match := re.match(r"^\.text\.(\S+):$", line):
            lines = result.setdefault(match[1], [])
        elif line.startswith("//----"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return result


class Graph:
    """Basic blocks, in the order of the text; a block is a list of instructions, and successors and
    predecessors are indices."""

    def __init__(self, lines):
        self.blocks, self.labels = [[]], {}
        for line in lines:
            self.read(line)
        self.successors = [self.followers(i) for i in range(len(self.blocks))]
        self.order = self.reverse_postorder()
        self.predecessors = defaultdict(list)
        for block in self.order:
            for next_block in self.successors[block]:
                self.predecessors[next_block].append(block)
        self.dominator = self.dominators()

    def read(self, line):
        if match := re.match(r"^(\S+):$", line):
            if self.blocks[-1]:
                self.blocks.append([])
            self.labels[match[1]] = len(self.blocks) - 1
        elif match := INSTRUCTION.match(line):
            self.blocks[-1].append(Instruction(match[2], match[3], match[4]))
            if self.blocks[-1][-1].kind in JUMPS:  # BSYNC is none: it goes on behind itself, where its BSSY said
                self.blocks.append([])

    def followers(self, i):
        if not self.blocks[i]:
            return [i + 1] if i + 1 < len(self.blocks) else []
        last, result = self.blocks[i][-1], []
        if last.kind in ("BRA", "JMP") and last.label in self.labels:
            result.append(self.labels[last.label])
        if last.kind == "BRX":
            result += [self.labels[label] for label in re.findall(r"\.L_x_\d+", last.operands)]
        return result + ([i + 1] if not last.always_jumps() and i + 1 < len(self.blocks) else [])

    def reverse_postorder(self):
        order, seen, stack = [], {0}, [(0, iter(self.successors[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((b for b in rest if b not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        return order[::-1]

    def dominators(self):
        """The nearest dominator of each block (Cooper, Harvey and Kennedy 2001)."""
        place, nearest, changed = {b: i for i, b in enumerate(self.order)}, {0: 0}, True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [p for p in self.predecessors[block] if p in nearest]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        if place[new] > place[other]:
                            new = nearest[new]
                        else:
                            other = nearest[other]
                changed = changed or nearest.get(block) != new
                nearest[block] = new
        return nearest

    def dominates(self, a, b):
        while b != a and b != 0:
            b = self.dominator[b]
        return a == b

    def loops(self):
        """start -> blocks of each natural loop."""
        result = {}
        for block in self.order:
            for start in self.successors[block]:
                if self.dominates(start, block):
                    result.setdefault(start, {start}).update(self.reaching(start, block))
        return result

    def reaching(self, start, end):
        seen, stack = {start}, [end]
        while stack:
            block = stack.pop()
            if block not in seen:
                seen.add(block)
                stack += self.predecessors[block]
        return seen

    def forward(self, body, block):
        """Successors within a turn of the loop."""
        return [s for s in self.successors[block] if s in body and not self.dominates(s, block)]


def accesses(block):
    return [a for a in (instruction.access() for instruction in block) if a]


def is_wide(block):
    return any(width >= WIDE for _, width in accesses(block))


def innermost(loops):
    """block -> start of the smallest loop that holds it."""
    result = {}
    for start in sorted(loops, key=lambda s: -len(loops[s])):
        result.update({block: start for block in loops[start]})
    return result


def main_loops(graph, loops):
    own, wide = innermost(loops), set()
    for block in own:
        if is_wide(graph.blocks[block]):
            wide.add(own[block])
    return [s for s in wide if not any(t != s and t in loops[s] for t in wide)]


def sharing_a_turn(graph, start, body):
    """Blocks of a loop from or to which a path leads to or from a wide access within a turn."""
    order = [block for block in graph.order if block in body]
    wide = {block for block in order if is_wide(graph.blocks[block])}
    after, before = set(wide), set(wide)
    for block in order:
        if block in after:
            after.update(graph.forward(body, block))
    for block in reversed(order):
        if any(s in before for s in graph.forward(body, block)):
            before.add(block)
    return after | before


def widest_path(graph, start, body):
    """The instructions of the turn that moves most bytes."""
    best = {}
    for block in reversed([b for b in graph.order if b in body]):
        bytes_here = sum(width for _, width in accesses(graph.blocks[block]) if width >= WIDE)
        tail = max((best[s] for s in graph.forward(body, block) if s in best), key=lambda t: t[0], default=(0, []))
        best[block] = (bytes_here + tail[0], [block] + tail[1])
    return [instruction for block in best[start][1] for instruction in graph.blocks[block]]


def in_flight(instructions):
    """(loads, bytes): the most that are on their way before the first use of one of them."""
    pending, most = {}, (0, 0)
    for instruction in instructions:
        used = {int(r) for r in re.findall(r"\bR(\d+)\b", instruction.operands)}
        access = instruction.access()
        target = re.match(r"R(\d+)", instruction.operands) if access and access[0] == "loads" else None
        pending = {key: value for key, value in pending.items() if not used & value[1]}
        if target:
            first = int(target[1])
            pending[first] = (access[1], set(range(first, first + max(access[1] // 4, 1))))
        most = max(most, (len(pending), sum(width for width, _ in pending.values())), key=lambda m: m[1])
    return most


def single_widths(graph, loops, kind):
    """Widths of the narrow accesses in innermost loops."""
    inner = [s for s in loops if not any(t != s and t in loops[s] for t in loops)]
    found = {width for s in inner for b in loops[s] for k, width in accesses(graph.blocks[b])
             if k == kind and width < WIDE}
    return sorted(found)


def analyse(lines):
    graph = Graph(lines)
    loops = graph.loops()
    result = {"loads": Counter(), "stores": Counter(), "flight_loads": 0, "flight_bytes": 0}
    flights = []
    for start in main_loops(graph, loops):
        for block in sharing_a_turn(graph, start, loops[start]):
            for kind, width in accesses(graph.blocks[block]):
                result[kind][width] += 1
        flights.append(in_flight(widest_path(graph, start, loops[start])))
    flights = [flight for flight in flights if flight[1]]
    if flights:
        result["flight_loads"], result["flight_bytes"] = min(flights, key=lambda f: f[1])
    in_loops = set().union(*loops.values()) if loops else set()
    in_any = [access for block in in_loops for access in accesses(graph.blocks[block])]
    for kind in ("loads", "stores"):
        result[f"single_{kind}"] = single_widths(graph, loops, kind)
        result[f"wide_{kind}"] = any(k == kind and width >= WIDE for k, width in in_any)
    result["loop_local"] = sum(instruction.is_local() for b in in_loops for instruction in graph.blocks[b])
    return result
