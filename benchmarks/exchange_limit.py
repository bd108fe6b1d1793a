"""An exchange beside the limit of its link: four hosts, all wire formats.

Command:   sudo "$(which python)" benchmarks/exchange_limit.py --rate 100mbit
Hardware:  any CPU; Linux, root, iproute2: 4 hosts are network namespaces on one bridge
Prints:    for each wire format the collectives of an exchange, the megabytes that a host
           sends, the seconds of a DiLoCo exchange, and their ratio to the limit

An exchange of P parameters in b bytes each sends 2 (W - 1) / W · b P bytes from each of W
hosts, as a ring does: the limit is the time of these bytes on the link. A program holds
nothing but the exchange. Seconds are the least of several, because other work on the
machine only adds to them.
"""

import argparse
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from limited_hosts import bits_of, join, work_or_run
from usage import head, parser, row

import lsgd_jax as lj
from train.planning.links import WIRES
from train.run import cli


PROCESSES = 4
WIDTHS = [784, *[1024] * 5, 10]  # of the layers of a network
BASE = f"digits --workers.nodes {PROCESSES} --workers.locals 1".split()
BYTES = {"bfloat16": 2.0} | {wire: WIRES[wire] for wire in ("float32", "int8", "int4")}
COLLECTIVE = re.compile(
    r" = (?P<made>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\("
)


def network() -> dict[str, Any]:
    """The parameters of a network, a matrix and a vector for each layer."""
    tree = {}
    for i, (before, after) in enumerate(zip(WIDTHS, WIDTHS[1:])):
        tree[f"kernel{i}"] = jnp.full([before, after], 0.5 / before)
        tree[f"bias{i}"] = jnp.zeros(after)
    return tree


def messages(text: str) -> int:
    """The messages of a compiled program, one after the other; a sum may have several."""
    found = 0
    for made, kind in COLLECTIVE.findall(text):
        buffers = len(re.findall(r"\w\[", made))
        found += buffers if kind == "all-reduce" else 1
    return found


def work(options: argparse.Namespace) -> None:
    """Runs one process: times the exchanges of all formats."""
    session = join(cli.parse(BASE), options, PROCESSES)
    workers = lj.Workers(PROCESSES, 1)
    session.connect(workers.mesh)
    start = network()
    count = sum(leaf.size for leaf in jax.tree.leaves(start))
    if session.is_main:
        print(f"{count:,} parameters in {len(start)} arrays, {options.rate}")
        head("wire", "messages", "MB", "seconds", "limit", "ratio")
    for wire, each in BYTES.items():
        method = lj.outer(lj.diloco(1, wire=wire))
        params = workers.replicate(start)
        state = workers.replicate(method.init(start))
        exchange = functools.partial(method.step, loss=jnp.float32(1))
        step = workers.map(exchange, donate=(0, 1)).lower(params, state).compile()
        seconds = []
        for _ in range(options.times + 1):
            session.wait_for_all()
            began = time.perf_counter()
            params, state = jax.block_until_ready(step(params, state))
            seconds.append(time.perf_counter() - began)
        sent = 2 * (PROCESSES - 1) / PROCESSES * each * count
        limit = 8 * sent / bits_of(options.rate)
        if session.is_main:
            least = min(seconds[1:])
            ratio = f"{least / limit:.2f}" if limit else "–"
            count_of = messages(step.as_text())
            row(wire, count_of, f"{sent / 1e6:.1f}", f"{least:.2f}", f"{limit:.2f}", ratio)


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--times", type=int, default=5, help="exchanges of each format")
    work_or_run(words, work, PROCESSES)


if __name__ == "__main__":
    main()
