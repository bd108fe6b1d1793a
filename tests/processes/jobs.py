"""Jobs that each of several processes does: jobs.py JOB FOLDER PORT COUNT PROCESS."""

import dataclasses
import json
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


# The library


def spread():
    """Two workers, each sharded over devices of the first and the second half."""
    devices = jax.devices()
    half = len(devices) // 2
    pairs = zip(devices[:half], devices[half:])
    devices = [device for pair in pairs for device in pair]
    return lj.Workers(1, 2, inside={"fsdp": half}, devices=devices)


def train(name, workers=None, specs=None):
    """Trains 8 workers, each a small network, with a method. Returns their parameters."""
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
    got, center = workers.fetch(params), workers.fetch(lj.consensus(params))
    for leaf in got:
        np.testing.assert_allclose(center[leaf], got[leaf].mean(0), rtol=1e-5, atol=1e-6)
    return got


def devices(folder, session):
    """The number of devices of each process."""
    return [jax.local_device_count(), jax.device_count()]


def methods(folder, session):
    """Trains with every method and writes METHOD.npz. Returns sums of the parameters."""
    sums = {}
    for method in METHODS:
        params = train(method)
        sums[method] = [float(np.abs(x).sum()) for x in params.values()]
        if session.is_main:
            np.savez(folder / f"{method}.npz", **params)
    params = train("lsgd", spread(), {"in": P(None, "fsdp"), "out": P("fsdp")})
    if session.is_main:
        np.savez(folder / "spread.npz", **params)
    workers = lj.Workers(2, 4)
    assert workers.fetch(workers.put(np.arange(8))).tolist() == list(range(8))
    return {"sums": sums, "owned": list(workers.owned)}


def printed(folder, session):
    """Returns each process's text of diagnostics, before and after they are fetched."""
    workers = lj.Workers(2, 4)
    tx = lj.lsgd(local_period=1, global_period=2)
    params = workers.put(np.ones((8, 3), np.float32))
    state = workers.map(tx.init)(params)
    # One process may print alone.
    alone = repr(lj.diagnostics(state)[0]) if session.is_main else ""
    return {"alone": alone, "fetched": repr(workers.fetch(lj.diagnostics(state))[0])}


def looped(folder, session):
    """Whether a loop, which compiles beside its steps, has the numbers of the phases."""
    workers = lj.Workers(2, 4)

    def update(x, goal):
        return jax.tree.map(lambda x, g: x - 0.5 * (x - g), x, goal), 0.0

    def equal(x, y):
        return bool(jnp.array_equal(x, y))

    method = lj.diloco(6, fragments=3, wire="int8")
    train = lj.around(update, method, params=(), result=0, loss=1)
    loop, step = workers.loop(train, donate=0), workers.map(train, static="phase")
    draw = np.random.default_rng(0).normal
    start = [draw(size=(8, n)).astype(np.float32) for n in (3, 40, 5)]
    goal = workers.put([x[::-1] for x in start])
    states = [workers.map(train.init)(workers.put(start)) for _ in range(2)]
    for t in range(1, 13):
        states = [
            loop(states[0], goal)[0],
            step(states[1], goal, phase=train.phase(t, workers.sizes))[0],
        ]
    found, expected = workers.fetch(states)
    return all(jax.tree.leaves(jax.tree.map(equal, found, expected)))


def beside(folder, session):
    """Whether an exchange on devices beside those that train has the numbers of one inside.

    The messages of both travel between the processes, and a state is fetched by all.
    """
    workers = lj.Workers(2, 4)
    assert jax.local_device_count() == 8

    def update(x, goal):
        return jax.tree.map(lambda x, g: x - 0.5 * (x - g), x, goal), 0.0

    train = lj.around(update, lj.local_sgd(4, delay=2), params=(), result=0, loss=1)
    loop = workers.loop(train, donate=0, beside=True)
    step = workers.map(train, static="phase")
    draw = np.random.default_rng(0).normal
    start = [draw(size=(8, n)).astype(np.float32) for n in (3, 40)]
    goal = workers.put([x[::-1] for x in start])
    states = [workers.map(train.init)(workers.put(start)) for _ in range(2)]
    jax.block_until_ready(states)
    for t in range(1, 12):
        states = [
            loop(states[0], goal)[0],
            step(states[1], goal, phase=train.phase(t, workers.sizes))[0],
        ]
        found, expected = workers.fetch(states)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    return [pull.exchanges for pull in workers.fetch(lj.diagnostics(states[0]))]


beside.devices = 16


# The trainer


def config_of(name, folder, nodes, locals, **changes):
    """A named experiment with a few settings changed."""
    from train.config import WorkersConfig, methods

    config = __import__(f"configs.{name}", fromlist=["CONFIG"]).CONFIG
    return dataclasses.replace(
        config,
        workers=WorkersConfig(nodes, locals),
        method=methods.make("lsgd", local_period=2, global_period=4),
        log_every=2,
        run_dir=str(folder),
        **changes,
    )


def configured(folder, nodes, locals, steps, **changes):
    """The configuration of a few steps on digits in a run folder."""
    return config_of("digits", folder, nodes, locals, steps=steps, batch_size=4, **changes)


def numbers_of(run):
    """The parameters of a run's workers, {name: array [W, ...]}."""
    fetched = run.experiment.workers.fetch(run.state.params)
    leaves = jax.tree_util.tree_leaves_with_path(fetched)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def opened(config, session):
    import tiny

    from train.run.open import open_run

    tiny.install()
    return open_run(config, session)


def write_and_grow(folder, session):
    """A run of 2 x 2 workers on as many devices, resumed with 2 x 4 workers."""
    from train.run import loop

    run = opened(configured(folder / "run", 2, 2, steps=4), session)
    loop.train(run)
    before = numbers_of(run)
    grown = opened(configured(folder / "run", 2, 4, steps=6, resume=True), session)
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


def imagenet(folder, session):
    """Eight steps on image files beside the folder; several processes resume half-way."""
    from train.config import DataConfig, OptimizerConfig
    from train.run import loop

    config = config_of(
        "imagenet_resnet50",
        folder / "run",
        2,
        4,
        model="digits-bn",
        data=DataConfig(
            "imagenet", dir=str(folder.parent / "data"), crop=16, reader_threads=2
        ),
        optimizer=OptimizerConfig(learning_rate=0.01),
        steps=4 if session.has_others else 8,
        batch_size=8,
        test_every=4,
        checkpoint_every=4,
    )
    run = opened(config, session)
    result = loop.train(run)
    if session.has_others:
        run = opened(dataclasses.replace(config, steps=8, resume=True), session)
        result = loop.train(run)
    total = sum(float(abs(x).sum()) for x in numbers_of(run).values())
    return {"error": result.tested.center["error"], "step": result.step, "total": total}


def other_files(folder, session):
    """The error of processes that see different image files."""
    try:
        imagenet(folder / str(session.process_id) / "result", session)
    except ValueError as error:
        return str(error)


def main(name, folder, port, count, rank):
    """Does a job in this process, which joins the others as a trainer does."""
    from configs.digits import CONFIG
    from train.cluster import rendezvous
    from train.config import DistributedConfig, WorkersConfig

    job = globals()[name]
    workers = WorkersConfig(nodes=2, locals=getattr(job, "devices", 8) // 2)
    options = DistributedConfig(
        coordinator=f"127.0.0.1:{port}", num_processes=int(count), process_id=int(rank)
    )
    config = dataclasses.replace(CONFIG, workers=workers, distributed=options)
    session = rendezvous.join(config)
    answer = job(pathlib.Path(folder), session)
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    main(*sys.argv[1:])
