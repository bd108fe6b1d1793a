"""Waiting on a slow network: the planner and the simulator beside measured training.

Command:   sudo "$(which python)" benchmarks/slow_network.py --rate 100mbit
Hardware:  any CPU; Linux, root, iproute2: 4 hosts are network namespaces on one bridge
Prints:    for LSGD and DiLoCo, with periods of train.plan, the share of time that workers
           wait: as planned, as simulated, and as measured

A step is a pause in place of an accelerator's work, so that the processes do not compete
for cores. The simulator is given the duration of a step and the link that the planner
measures, whose rate is that of an all-reduce with all of its software. The measured share
is 1 - (time without exchanges) / (time with them). Both times are the minimum of several,
because other work on the machine only adds to them.
"""

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from limited_hosts import join, work_or_run
from usage import head, parser, row

import lsgd_jax as lj
from train import simulate
from train.cluster.session import Session
from train.config import Config
from train.planning.engine import still
from train.planning.links import Link
from train.planning.measurement import measure_link
from train.planning.scenario import ALL, Scenario
from train.run import cli


PROCESSES = 4
LEAVES = 16
SIMULATED = 64  # steps, a multiple of most periods
PAUSE, PERIODS = 0.1, 5  # seconds in a step, and periods to measure
BASE = f"digits --workers.nodes {PROCESSES} --workers.locals 1".split()


class Timed:
    """Training with a method whose parameters do not change."""

    def __init__(self, config: Config, workers: lj.Workers, params: Any, session: Session):
        tx = config.method.around(optax.sgd(0.1))

        def step(params, state):
            loss = sum(jnp.mean(leaf) for leaf in jax.tree.leaves(params))
            no_move = jax.tree.map(jnp.zeros_like, params)
            updates, state = tx.update(no_move, state, params, value=loss)
            return lj.apply_updates(params, updates), state

        self._step = workers.map(step)
        self._session = session
        self._state = params, workers.map(tx.init)(params)

    def period_seconds(self, steps: int) -> float:
        """Times `steps` steps several times and returns the least, without the first."""
        found = []
        for i in range(PERIODS + 1):
            if i < 2:
                self._session.wait_for_all()
            began = time.perf_counter()
            for _ in range(steps):
                self._state = jax.block_until_ready(self._step(*self._state))
                time.sleep(PAUSE)
            found.append(time.perf_counter() - began)
        return min(found[1:])


def simulated(config: Config, step: float, link: Link, params: Any) -> float:
    """Returns the share of time that workers wait in the simulator."""
    found = lj.asynchronous.simulator.run(
        still(params),
        simulate.method(config),
        PROCESSES,
        1,
        SIMULATED,
        link.network,
        lj.asynchronous.Speeds(step),
        collectives=True,
    )
    return 1 - SIMULATED * step / found.seconds


def work(options: argparse.Namespace) -> None:
    """Runs one process: measures, plans, and compares the plan with training."""
    session = join(cli.parse(BASE), options, PROCESSES)
    workers = lj.Workers(PROCESSES, 1)
    session.connect(workers.mesh)
    rows = int(options.mb * 1e6 / 4 / LEAVES / 100)
    start = [jnp.ones([rows, 100]) for _ in range(LEAVES)]
    params = workers.replicate(start)
    payload = LEAVES * rows * 400
    link = measure_link(workers, params, ("node", "local"), PROCESSES)
    parse = lambda words: cli.parse([*BASE, *words.split()])
    alone = Timed(parse("--method independent"), workers, params, session)
    step = alone.period_seconds(16) / 16
    scenario = Scenario(payload / 4, {ALL: link}, step=step, leaves=LEAVES)
    planned = [
        (found.options, found.periods[-1], found.share)
        for found in scenario.candidates(options.share)
        if found.method.name in ("lsgd", "diloco") and not found.method.delay
    ]
    planned = json.loads(session.agree(json.dumps(planned)))  # the same in all processes
    if session.is_main:
        print(f"{options.rate}, {payload / 1e6:.1f} MB, a step {1e3 * step:.1f} ms: {link}")
        head("settings", "planned, %", "simulated, %", "measured, %")
    for words, period, predicted in planned:
        config = parse(words)
        trained = Timed(config, workers, params, session)
        times = max(1, 8 // period)
        taken = trained.period_seconds(times * period) / times
        silent = alone.period_seconds(16) / 16
        if session.is_main:
            predictions = predicted, simulated(config, silent, link, start)
            shares = *predictions, 1 - period * silent / taken
            row(f"`{words}`", *(f"{100 * share:.1f}" for share in shares))


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument(
        "--share", type=float, default=0.2, help="largest share of time to wait"
    )
    words.add_argument(
        "--mb", type=float, default=1.0, help="megabytes of float32 parameters"
    )
    work_or_run(words, work, PROCESSES)


if __name__ == "__main__":
    main()
