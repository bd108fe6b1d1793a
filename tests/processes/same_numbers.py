"""What each of several processes does in test_same_numbers.py; runs in pytest's, too."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


STEPS = 12
METHODS = {
    "lsgd": lambda: lj.lsgd(0.3, 0.2, local_period=2, global_period=4, loss_window=3),
    "easgd": lambda: lj.easgd(beta=0.5, period=2),
    "sgp": lambda: lj.sgp(lj.topology.exponential(8)),
}


def spread():
    """Two workers, each of them sharded over devices of the first and the second half."""
    devices = jax.devices()
    half = len(devices) // 2
    pairs = zip(devices[:half], devices[half:])
    devices = [device for pair in pairs for device in pair]
    return lj.Workers(1, 2, inside={"fsdp": half}, devices=devices)


def train(name, workers=None, specs=None):
    """The parameters of 8 workers, a small network each, after some steps of a method."""
    workers = workers or lj.Workers(2, 4)
    tx = optax.chain(optax.sgd(0.1, momentum=0.5), METHODS[name]())
    draw = np.random.default_rng(0).normal
    start = {"in": draw(size=(8, 5, 16)), "out": draw(size=(8, 16, 3))}
    inputs = draw(size=(STEPS, 8, 10, 5))
    wanted = np.sin(inputs @ draw(size=(5, 3)))
    mine = lambda tree: jax.tree.map(
        lambda x: np.asarray(x, np.float32)[list(workers.owned)], tree
    )

    def step(params, state, x, y):
        def loss_of(params):
            return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state

    params = workers.put_owned(mine(start), specs)
    state, step = workers.map(tx.init)(params), workers.map(step, donate=(0, 1))
    for x, y in zip(inputs, wanted):
        params, state = step(params, state, *workers.put_owned(mine((x, y))))
    return workers.fetch(params)


def methods(folder, session):
    """Trains with every method and writes the parameters to METHOD.npz; their sums."""
    sums = {}
    for method in METHODS:
        params = train(method)
        sums[method] = [float(np.abs(x).sum()) for x in params.values()]
        if session.is_main:
            np.savez(folder / f"{method}.npz", **params)
    params = train("lsgd", spread(), {"in": P(None, "fsdp"), "out": P("fsdp")})
    if session.is_main:
        np.savez(folder / "spread.npz", **params)
    return sums


def configured(folder, nodes, locals, steps, **changes):
    """A few steps of the trainer in a run folder."""
    from configs.digits import CONFIG
    from train.config import WorkersConfig
    from train.task import methods

    return dataclasses.replace(
        CONFIG,
        workers=WorkersConfig(nodes, locals),
        method=methods.make("lsgd", local_period=2, global_period=4),
        steps=steps,
        batch_size=4,
        log_every=2,
        run_dir=str(folder),
        **changes,
    )


def numbers_of(run):
    """The parameters of a run's workers by name, arrays [W, ...]."""
    fetched = run.experiment.workers.fetch(run.state.params)
    leaves = jax.tree_util.tree_leaves_with_path(fetched)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def write_and_grow(folder, session):
    """A run of 2 x 2 workers on as many devices, and the same gone on with by 2 x 4."""
    import tiny

    from train.run import loop
    from train.run.open import open_run

    tiny.install()
    run = open_run(configured(folder / "run", 2, 2, steps=4), session)
    loop.train(run)
    before = numbers_of(run)
    grown = open_run(configured(folder / "run", 2, 4, steps=6, resume=True), session)
    owned, sources = list(grown.experiment.workers.owned), grown.resizing.sources
    restored = numbers_of(grown)
    same = all((restored[name] == x[sources]).all() for name, x in before.items())
    result = loop.train(grown)
    after = numbers_of(grown)
    if session.is_main:
        np.savez(folder / "before.npz", **before)
        np.savez(folder / "after.npz", **after)
    return {"owned": owned, "sources": sources, "same": same, "step": result.step}


write_and_grow.devices = 4

if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    from together import main

    main({"methods": methods, "write_and_grow": write_and_grow})
