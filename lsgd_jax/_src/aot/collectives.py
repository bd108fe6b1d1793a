"""The collectives of a compiled program: their bytes, whom they reach, what hides them."""

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lsgd_jax._src.aot.groups import Groups, expanded, groups_of, pairs_of
from lsgd_jax._src.aot.hlo import HloModule, Instruction, nbytes


KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)
KIND = re.compile(rf"^({'|'.join(KINDS)})(-start)?$")
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
MEGASCALE = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
FIELD = re.compile(
    r'_xla_(megascale_\w+|host_transfer_rendezvous)=(?:"([^"]*)"|(\{.*?\}\}))'
)
SLICE = 100_000  # XLA gives the devices of slice i the ids from i * SLICE

SMALL = 0.01  # the share of a program's bytes below which a message is only a flag
ROUNDS = "all-to-all", "all-gather"  # of a mean in few bits
FORWARD = 0.2  # a forward pass has at least so many of the products of a step


class Collective(NamedTuple):
    """One collective of a program.

    All bytes are those of one device and one execution. The bytes that are sent are the
    fewest that any algorithm sends: for an all-reduce of S bytes among n devices
    2 (n - 1) / n S, and 2 (h - 1) / h S leave each of h slices or hosts.

    Attributes:
      name: its name in the program.
      kind: such as 'all-reduce'.
      bytes: the size of its result. For a transfer between slices, the size of the message.
      sent: the bytes that a device sends.
      across: the bytes that leave the device's slice or host; 0 if it stays inside.
      times: how often it is executed; more than once in a loop.
      conditional: whether it stands in a conditional, which XLA waits for as a whole.
      overlap: the share of the program's matrix products that are scheduled between its
        start and its end.
      links: the share of a device's links inside its slice that its group can use.
      waits: whether it depends on a matrix product of the step.
    """

    name: str
    kind: str
    bytes: int
    sent: float
    across: float
    times: int
    conditional: bool
    overlap: float
    links: float = 1.0
    waits: bool = False

    @property
    def crosses(self) -> bool:
        """Whether it sends anything to another slice or host."""
        return self.across > 0

    @property
    def hidden(self) -> bool:
        """Whether matrix products are scheduled between its start and its end."""
        return self.overlap > 0


def beside(each: Collective, collectives: Iterable[Collective]) -> float:
    """The share of the products beside a message to other slices or hosts.

    A mean in few bits has two rounds. The first one travels beside the forward pass and the
    second one beside the backward pass, so their overlaps add up.
    """
    others = [x.overlap for x in _large(collectives) if {x.kind, each.kind} == set(ROUNDS)]
    return each.overlap + (min(others, default=0.0) if each.overlap >= FORWARD else 0.0)


def exposed(collectives: Iterable[Collective], overlap: float) -> list[Collective]:
    """The messages to other slices or hosts with a smaller overlap, without flags."""
    large = _large(collectives)
    return [each for each in large if beside(each, large) < overlap]


def _large(collectives: Iterable[Collective]) -> list[Collective]:
    crossing = [each for each in collectives if each.crosses]
    least = SMALL * sum(each.times * each.across for each in crossing)
    return [each for each in crossing if each.times * each.across >= least]


class Placement(NamedTuple):
    """Where the devices of a program stand.

    Attributes:
      groups: for each device in the order of the program, its slice or host.
      splits: whether XLA writes transfers between groups as sends, so that all other
        collectives stay inside (TPU slices).
      links: from a kind of collective and the places of a group's devices in that order to
        the share of their links that it can use.
    """

    groups: Sequence[int]
    splits: bool
    links: Callable[[str, Sequence[int]], float] = lambda kind, members: 1.0


def collectives_of(program: HloModule, placement: Placement) -> list[Collective]:
    """Returns all collectives of a program, computation by computation."""
    everything = program.products(program.entry)
    found = []
    for lines, times, conditional in program.runs():
        before = [0]
        for line in lines:
            before.append(before[-1] + program.products_of(line))
        later = _after_products(program, lines)
        for each in _transfers(program, lines):
            products = times * (before[each.end] - before[each.start + each.alone])
            sent, across, links = _sent(each, placement)
            found.append(
                Collective(
                    name=each.line.name,
                    kind=each.kind,
                    bytes=each.bytes,
                    sent=sent,
                    across=across,
                    times=times,
                    conditional=conditional,
                    overlap=min(1.0, products / everything) if everything else 0.0,
                    links=links,
                    waits=any(name in later for name in lines[each.start].operands),
                )
            )
    return found


def _after_products(program: HloModule, lines: Sequence[Instruction]) -> set[str]:
    """The instructions of a computation that depend on a product in it, or are one."""
    found: set[str] = set()
    for line in lines:
        if program.products_of(line) or any(name in found for name in line.operands):
            found.add(line.name)
    return found


class _Transfer(NamedTuple):
    """A collective in a computation.

    alone: 1 if the instruction at `start` holds the collective only, 0 if it is a fusion
    that also computes.
    """

    kind: str
    line: Instruction
    bytes: int
    start: int
    end: int
    alone: int = 1


def _transfers(program: HloModule, lines: Sequence[Instruction]) -> Iterator[_Transfer]:
    """Pairs starts with ends, among the instructions of one computation."""
    ends = {}  # name of a start -> (position, instruction) of its end
    for i, line in enumerate(lines):
        if line.opcode.endswith("-done"):
            for operand in line.operands:
                ends[operand] = i, line
    received = {}
    for line in lines:
        if line.opcode == "recv" and "xla_megascale_runtime" in line.attributes:
            received[_fields(line).get("host_transfer_rendezvous")] = line
    for i, line in enumerate(lines):
        found = KIND.match(line.opcode)
        if found:
            at, done = ends.get(line.name, (i, line))
            at = i if '"is_sync":true' in line.attributes else at  # on GPUs
            yield _Transfer(found.group(1), line, done.nbytes, i, at)
        elif line.opcode == "async-start":
            at, done = ends.get(line.name, (i, line))
            for inner in _inside(program, line):
                yield _Transfer(inner.opcode, inner, inner.nbytes, i, at)
        elif line.opcode == "send" and "xla_megascale_runtime" in line.attributes:
            fields = _fields(line)
            back = received.get(fields.get("host_transfer_rendezvous"), line)
            at, _ = ends.get(back.name, ends.get(line.name, (i, line)))
            kind = MEGASCALE.get(fields.get("megascale_transfer_type", ""), "send")
            # The type of a send is (message, context, token).
            message = nbytes(line.type.partition(", u32[]")[0])
            yield _Transfer(kind, line, message, i, at)
    yield from _fused(program, lines)


def _fused(program: HloModule, lines: Sequence[Instruction]) -> Iterator[_Transfer]:
    """Collectives in fusions. One that runs beside products spans several fusions."""
    spans: dict[Any, list[tuple[int, Instruction]]] = collections.defaultdict(list)
    for i, line in enumerate(lines):
        if line.opcode == "fusion":
            for inner in _inside(program, line):
                channel = CHANNEL.search(inner.attributes)
                is_async = "async_collective_fusion_config" in inner.attributes
                key = (
                    (inner.opcode, channel and channel.group(1)) if is_async else inner.name
                )
                spans[key].append((i, inner))
    for places in spans.values():
        first, line = places[0]
        last, _ = places[-1]
        kind = line.opcode.removesuffix("-start")
        if kind == "send":
            kind = MEGASCALE.get(_fields(line).get("megascale_transfer_type", ""), kind)
        end = last if first == last else last + 1
        yield _Transfer(kind, line, line.nbytes, first, end, int(first == last))


def _inside(program: HloModule, line: Instruction) -> Iterator[Instruction]:
    for name in line.called:
        lines = program.computations.get(name, [])
        for inner in lines:
            if KIND.match(inner.opcode):
                # XLA for TPUs writes a reduce-scatter as a fusion: an all-reduce, and the
                # slices of its result that a device keeps.
                is_scatter = name.startswith("all-reduce-scatter")
                scatter = inner._replace(opcode="reduce-scatter", type=lines[-1].type)
                yield scatter if is_scatter else inner
            elif inner.opcode == "fusion":
                yield from _inside(program, inner)


def _fields(line: Instruction) -> dict[str, str]:
    return {name: a or b for name, a, b in FIELD.findall(line.attributes)}


# Bytes


def _sent(each: _Transfer, placement: Placement) -> tuple[float, float, float]:
    """Returns the bytes sent, those that leave a slice or host, and the share of links."""
    if each.line.opcode == "send":
        across = _between_slices(each)
        return across, across, 1.0
    count = len(placement.groups)
    if each.kind == "collective-permute":
        pairs = [(a, b) for a, b in pairs_of(each.line.attributes) if a != b]
        apart = [p for p in pairs if _span(placement, p) > 1]
        sent = each.bytes * min(1, len(pairs) / count)
        across = len(apart) / count
        links = min((placement.links(each.kind, p) for p in pairs), default=1.0)
        return sent, each.bytes * across, links
    groups = groups_of(each.line.attributes, count)
    size = max(map(len, groups))
    whole = each.bytes * (size if each.kind == "reduce-scatter" else 1)
    across = _leaving(each.kind, whole, groups, placement)
    links = placement.links(each.kind, max(groups, key=len))
    return _share(each.kind, size) * whole, across, links


def _share(kind: str, n: int) -> float:
    """The share of the whole array that each of n members sends to the others."""
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (n - 1) / n


def _leaving(kind: str, whole: float, groups: Groups, placement: Placement) -> float:
    """Mean bytes per device that leave its slice or host."""
    total = 0.0
    for members in groups:
        hosts = _span(placement, members)
        # In an exchange of all with all each member has its own array.
        arrays = len(members) / hosts if "all-to-all" in kind else 1
        total += hosts * _share(kind, hosts) * whole * arrays
    return total / sum(map(len, groups))


def _span(placement: Placement, members: Iterable[int]) -> int:
    """The number of slices or hosts among which these devices lie."""
    if placement.splits:
        return 1
    count = len(placement.groups)
    return len({placement.groups[i % count] for i in members})


def _between_slices(each: _Transfer) -> float:
    """Bytes that a device sends to other slices in a transfer that XLA wrote as a send."""
    fields = _fields(each.line)
    target = fields.get("megascale_target", "")
    if "->" in target:
        pairs = re.findall(r"(\d+)->(\d+)", target)
        senders = {a for a, _ in pairs}
        inside = max((int(x) % SLICE for pair in pairs for x in pair), default=0) + 1
        slices = {int(x) // SLICE for pair in pairs for x in pair}
        return each.bytes * min(1.0, len(senders) / (inside * len(slices)))
    if "x" in target:
        first = re.findall(r"\{([\d,:]+)\}", target.partition("}x")[0] + "}")
        n = len(expanded(first[0])) if first else 2
    else:
        n = len({int(x) // SLICE for x in re.findall(r"\d+", target)}) or 2
    if each.kind == "all-gather":
        return each.bytes * (n - 1.0)  # the message is a device's own share
    return _share(each.kind, n) * each.bytes
