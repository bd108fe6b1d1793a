"""What each of several processes does in test_processes.py: python together.py JOB ..."""

import json
import pathlib
import sys

import jax


def lsgd_oracle(folder, session):
    """The parameters after the last step of an oracle, each process loading its rows."""
    import numpy as np
    import optax

    import lsgd_jax as lj

    oracle = np.load(folder / "lsgd_multi_leader.npz")
    workers = lj.Workers(2, 4)
    tx = optax.chain(optax.sgd(0.1), lj.lsgd(0.2, 0.4, 2, 4, loss_window=3))
    mine = slice(workers.owned.start, workers.owned.stop)

    def step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state

    def rows(name, *t):
        return np.asarray(oracle[name][t][mine] if t else oracle[name][mine], np.float32)

    params = workers.put_owned({"w": rows("x0_w"), "b": rows("x0_b")})
    state = workers.map(tx.init)(params)
    step = workers.map(step, donate=(0, 1))
    for t in range(16):
        grads = workers.put_owned({"w": rows("grads_w", t), "b": rows("grads_b", t)})
        params, state = step(params, state, grads, workers.put_owned(rows("losses", t)))
    got = workers.fetch(params)
    center = workers.fetch(lj.consensus(params))
    for name in ("w", "b"):
        expected = oracle[f"params_{name}"][-1]
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(center[name], expected.mean(0), rtol=1e-5, atol=1e-6)
    leaders = [workers.fetch(level.leader).tolist() for level in lj.diagnostics(state)]
    whole = workers.put(np.arange(8))
    assert workers.fetch(whole).tolist() == list(range(8))
    return {"owned": list(workers.owned), "leaders": leaders}


def lsgd_oracle_on_pretended_hosts(folder, session):
    """The same, ranks dealt out to two hosts in turn."""

    from lsgd_jax._src import device_grid

    device_grid._host = lambda device: device.process_index % 2
    return lsgd_oracle(folder, session)


def imagenet(folder, session):
    """Steps of the trainer with images in files, which lie beside the folder.

    In one process all at once, in several resumed half-way.
    """
    import dataclasses

    import tiny

    from configs.imagenet_resnet50 import CONFIG
    from train.config import DataConfig, OptimizerConfig, WorkersConfig

    tiny.install()
    data = DataConfig("imagenet", dir=str(folder.parent / "data"), crop=16)
    config = dataclasses.replace(
        CONFIG,
        model="digits-bn",
        data=dataclasses.replace(data, reader_threads=2),
        workers=WorkersConfig(2, 4),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    return train(config, folder, session)


def other_files(folder, session):
    """What a process says whose images are not those of the other one."""
    try:
        imagenet(folder / str(session.process_id) / "result", session)
    except ValueError as error:
        return str(error)


def train(config, folder, session):
    """Eight steps of an experiment with a few settings changed."""
    import dataclasses

    from train.run import loop
    from train.run.open import open_run
    from train.task import methods

    config = dataclasses.replace(
        config,
        method=methods.make("lsgd", local_period=2, global_period=4),
        steps=4 if session.has_others else 8,
        batch_size=8,
        log_every=2,
        test_every=4,
        checkpoint_every=4,
        run_dir=str(folder / "run"),
    )
    run = open_run(config, session)
    result = loop.train(run)
    if session.has_others:
        run = open_run(dataclasses.replace(config, steps=8, resume=True), session)
        result = loop.train(run)
    numbers = run.experiment.workers.fetch(run.state.params)
    total = sum(float(abs(x).sum()) for x in jax.tree.leaves(numbers))
    return {"error": result.tested.center["error"], "step": result.step, "total": total}


def joined(port, count, rank):
    """The session of this process, as a trainer has it."""
    import dataclasses

    from configs.digits import CONFIG
    from train.cluster import rendezvous
    from train.config import DistributedConfig

    options = DistributedConfig(
        coordinator=f"127.0.0.1:{port}",
        num_processes=int(count),
        process_id=int(rank),
        start_timeout=120,
        heartbeat_timeout=30,
    )
    return rendezvous.join(dataclasses.replace(CONFIG, distributed=options))


def main(jobs):
    """Does one of the jobs in this process, as the command line says."""
    job, folder, port, count, rank = sys.argv[1:]
    all_devices = getattr(jobs[job], "devices", 8)
    jax.config.update("jax_num_cpu_devices", all_devices // int(count))
    answer = jobs[job](pathlib.Path(folder), joined(port, count, rank))
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    main(globals())
