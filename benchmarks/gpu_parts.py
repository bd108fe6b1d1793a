"""One part of `gpu.py`, which starts this program. Prints each result as a line of JSON."""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from exchange_cost import in_turns, sizes_of
from gpu import ROW, SMALL, Sizes
from jax.experimental import multihost_utils

import lsgd_jax as lj
from train.task.transformer import Transformer


NEVER = 1_000_000
PLENTY = 30e9  # bytes of a GPU that has room for four workers of 100 million parameters


class Arm:
    """A step and the state that it updates, which several arms can share."""

    def __init__(self, step, box):
        self._step, self._box = step, box

    def seconds_per_step(self, steps):
        """Runs a block of steps and returns the seconds per step."""
        jax.block_until_ready(self._box.state)
        began = time.perf_counter()
        for _ in range(steps):
            self._box.state = self._step(*self._box.state)
        jax.block_until_ready(self._box.state)
        return (time.perf_counter() - began) / steps


def timed(sizes, arms):
    """Times blocks of all arms in turns and returns the milliseconds per step."""
    for arm in arms.values():
        arm.seconds_per_step(1)  # compiles
    slowest = max(arm.seconds_per_step(1) for arm in arms.values())
    steps = np.int32(max(2, min(100, sizes.block_s / slowest)))
    # All processes must take the same number of steps, because pulls are collective.
    steps = int(multihost_utils.broadcast_one_to_all(steps))
    return in_turns(arms, sizes.repetitions, steps)


def row_of(case, times, beside, others, more=lambda ms: ""):
    """Returns a row of times."""
    ratios = [a / b for a, b in zip(times, others)]
    cell = lambda x: f"{statistics.median(x):.2f} ms{more(statistics.median(x))}"
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [case, cell(times), beside, cell(others), ratio]


def devices(options, sizes):
    """Describes the devices of this machine."""
    backend, count = jax.default_backend(), jax.device_count()
    gpus = count if backend == "gpu" else 0
    kind = jax.devices()[0].device_kind
    yield dict(backend=backend, gpus=gpus, count=count, kind=kind, jax=jax.__version__)


# Workers of one device


def workers(options, sizes):
    """Times workers of one device beside a model of their total batch and one worker."""
    for network in sizes.networks:
        one = network_arm(network, 1, network.batch)
        for count in sizes.counts:
            samples = count * network.batch
            arms = {"one model": network_arm(network, None, samples), "one worker": one}
            if count > 1:
                arms["workers"] = network_arm(network, count, network.batch)
            times = timed(sizes, arms)

            def rate(ms, samples=samples):
                return f", {1e3 / ms:.1f} steps/s, {1e3 * samples / ms:.0f} samples/s"

            millions = sum(x.size for x in jax.tree.leaves(started(network)[1])) / 1e6
            whose = f"{count} worker{'s' * (count > 1)} of {millions:.3g} M {network.dtype}"
            case = f"{whose}, batch {network.batch}"
            seen = times["workers" if count > 1 else "one worker"]
            model = f"one model, batch {samples}"
            yield row_of(case, seen, model, times["one model"], rate)
            if count > 1:
                yield row_of(f"{case}: as a price", seen, "1 worker", times["one worker"])


@functools.cache
def started(network):
    """Returns a network and its initial parameters, on the host."""
    given = dataclasses.asdict(network)
    given.pop("batch")
    model = Transformer(**given)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.device_get(variables["params"])


def network_arm(network, count, batch):
    """Returns an AdamW step of `count` workers of one device, or of a model for None."""
    (model, start), tx = started(network), optax.adamw(1e-3)
    shape = (count or 1, batch, network.context + 1)
    tokens = np.random.default_rng(0).integers(0, network.vocabulary, shape, np.int32)

    def step(params, state, tokens):
        def loss_of(params):
            logits = model.apply({"params": params}, tokens[:, :-1])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return each.mean()

        updates, state = tx.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state, tokens

    if count is None:
        params, tokens = jax.device_put((start, tokens[0]))
        box = types.SimpleNamespace(state=(params, tx.init(params), tokens))
        return Arm(jax.jit(step, donate_argnums=(0, 1)), box)
    grid = lj.Workers(1, count, devices=jax.devices()[:1])
    params = grid.replicate(start)
    box = types.SimpleNamespace(state=(params, grid.map(tx.init)(params), grid.put(tokens)))
    return Arm(grid.map(step, donate=(0, 1)), box)


# Pulls


def pulls(options, sizes):
    """Times steps with and without a pull among workers of one device."""
    yield from time_pulls(sizes, grid_of_device(), "workers of one device")


def processes(options, sizes):
    """Times steps with and without a pull among processes of one device each."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{options.port}",
        options.processes,
        options.process_id,
        [options.process_id],
    )
    yield from time_pulls(sizes, lj.Workers(1, options.processes), "processes")


def grid_of_device():
    """Returns as many workers on one device as its memory can hold, 4 or 2."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    count = 4 if stats.get("bytes_limit", PLENTY) >= PLENTY else 2
    return lj.Workers(1, count, devices=[device])


def tree_of(sizes):
    """Returns the parameters of a worker."""
    counts = sizes_of(sizes.parameters, sizes.leaves)
    rng = np.random.default_rng(0)
    return {f"leaf{i:03}": rng.random(n, np.float32) for i, n in enumerate(counts)}


def gradients_and_loss(grid, tree):
    """Returns made-up gradients and losses of all workers."""
    rows = np.arange(grid.num_workers, dtype=np.float32)
    return grid.replicate(jax.tree.map(lambda x: 1e-3 * x, tree)), grid.put(rows)


def method(name, period, wire="float32"):
    """Returns a method with a period."""
    if name == "lsgd":
        return lj.lsgd(0.1, 0.0, period, period, wire=wire)
    return {"diloco": lj.diloco, "easgd": lj.easgd}[name](period=period, wire=wire)


def mapped_step(grid, pull=None, due=None, donate=True):
    """Returns an AdamW step with or without a pull; without, the pull's state is kept."""
    base = optax.adamw(1e-3)

    def step(params, inner, outer, gradients, loss):
        if pull is None:
            updates, inner = base.update(gradients, inner, params)
            return lj.apply_updates(params, updates), inner, outer
        updates, state = optax.chain(base, pull).update(
            gradients, (inner, outer), params, value=loss, due=due
        )
        return lj.apply_updates(params, updates), *state

    return grid.map(step, donate=(0, 1, 2) if donate else ())


def first_state(grid, tree, pull):
    """Returns the parameters, AdamW's state and the pull's state."""
    params = grid.replicate(tree)
    return params, *grid.map(optax.chain(optax.adamw(1e-3), pull).init)(params)


def time_pulls(sizes, grid, among):
    """Times AdamW alone and steps with and without a pull, in turns on one state."""
    tree = tree_of(sizes)
    given = gradients_and_loss(grid, tree)
    for wire in sizes.wires:
        for name in sizes.methods:
            rare = method(name, NEVER, wire)
            box = types.SimpleNamespace(state=first_state(grid, tree, rare))
            steps = {
                "AdamW alone": mapped_step(grid),
                "a step with its pull": mapped_step(grid, method(name, 1, wire)),
                "a step that is not due": mapped_step(grid, rare),
                "a step compiled with due=False": mapped_step(grid, rare, due=False),
            }
            arms = {
                words: Arm(lambda *state, step=step: step(*state, *given), box)
                for words, step in steps.items()
            }
            times = timed(sizes, arms)
            alone = times.pop("AdamW alone")
            whose = f"{name}, {wire}, {sizes.parameters:g} M, {grid.num_workers} {among}"
            for words, seen in times.items():
                yield row_of(f"{whose}: {words}", seen, "AdamW alone", alone)
            box.state = None  # frees its memory for the next method


def memory(options, sizes):
    """Measures the peak of memory of steps with a pull, with or without donation."""
    grid, tree = grid_of_device(), tree_of(sizes)
    pull, given = method(options.method, 1), gradients_and_loss(grid, tree)
    state = first_state(grid, tree, pull)
    step = mapped_step(grid, pull, donate=options.donate == 1)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    found = {"parameters": size(tree), "state": size(state[2])}
    plan = step.lower(*state, *given).compile().memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes
    planned += plan.temp_size_in_bytes - plan.alias_size_in_bytes
    for _ in range(3):
        state = step(*state, *given)
    jax.block_until_ready(state)
    stats = jax.devices()[0].memory_stats() or {}  # CPUs have none
    found |= {"peak in use": stats.get("peak_bytes_in_use")}
    yield found | {"planned by the compiler": planned}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {f.__name__: f for f in (devices, workers, pulls, processes, memory)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--method")
    for name in ("--donate", "--processes", "--process-id", "--port"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    # The default is three quarters of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    lj.tune_cpu()
    for found in parts[options.part](options, SMALL if options.small else Sizes()):
        if jax.process_index() == 0:
            print(ROW + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
