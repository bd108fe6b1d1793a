"""Predicted and real seconds per 100 steps of 4 workers on a limited network.

    python benchmarks/simulated_against_real.py --rates 100mbit,1gbit

runs as root on Linux. It makes 4 hosts on this machine (network namespaces on a bridge,
with each host's uplink limited by tc's token bucket), trains on them with 4 synchronous
processes (jax.distributed over gloo) and with 4 asynchronous workers on Ray, and simulates
both. A step sleeps for --step-ms, so that the comparison is about waiting, not about the
speed of a shared CPU. The parameters are one vector of --megabytes.

The simulator's inputs are measured separately: the time of a step in a run without
exchanges, the cost of the software in a run of each engine's first method without a limit,
and the bandwidth by TCP streams from each host to the next.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from limited_hosts import limited_hosts, ray_on
from usage import head, parser, row

import lsgd_jax as lj


HOSTS, WARM = 4, 8  # the first WARM steps are not counted, because they compile
METHODS = {
    "all-reduce, every step": ("processes", lj.local_sgd(1), False),
    "lsgd, period 8": ("processes", lj.lsgd(0, 0.1, 8, 8), False),
    "async-lsgd, period 8": ("ray", lj.lsgd(0, 0.1, 8, 8), True),
    "overlapped lsgd, period 8, delay 4": ("ray", lj.lsgd(0, 0.1, 8, 8, delay=4), False),
}
AGAIN = [sys.executable, __file__, "--role"]
PIPES: Any = dict(stdout=subprocess.PIPE, text=True)
NONE = {"processes": lj.local_sgd(10**6), "ray": lj.local_sgd(10**6)}


# Training


def make_training(size, seconds):
    """Makes a training whose steps sleep; `own` holds the times of steps WARM and last."""
    update = jax.jit(lambda params, t: (params["w"] * 0 + 1e-3, 1.0 + t * 0.0))

    def init(i):
        return {"w": jnp.zeros(size)}, (), (0.0, 0.0, 0)

    def step(params, opt_state, own, t):
        u, loss = update(params, jnp.float32(t))
        loss.block_until_ready()
        time.sleep(seconds)
        now, t = time.time(), int(t)
        begun = now if t == WARM else own[0]
        return {"w": u}, opt_state, (begun, now, t), loss

    return lj.asynchronous.Training(init, step)


def per_100_steps(owns):
    return float(np.mean([100 * (last - begun) / (t - WARM) for begun, last, t in owns]))


# Two kinds of real runs, in processes that this file starts with `--role`


def role_process(job):
    """Runs a synchronous process, which prints seconds per 100 steps."""
    jax.distributed.initialize(f"{job['addresses'][0]}:7001", HOSTS, job["host"])
    workers = lj.Workers(HOSTS, 1)
    tx = optax.chain(optax.sgd(1e-3), exchange_of(job))
    params = workers.replicate({"w": jnp.zeros(job["size"])})
    state = workers.map(tx.init)(params)

    def step(params, state):
        loss = jnp.float32(1) + 0 * params["w"][0]
        u, state = tx.update({"w": params["w"] * 0 + 1}, state, params, value=loss)
        return lj.apply_updates(params, u), state, loss

    step = workers.map(step)
    for t in range(1, job["steps"] + 1):
        params, state, loss = step(params, state)
        jax.block_until_ready(params)
        time.sleep(job["seconds"])
        if t == WARM:
            begun = time.time()
    print("RESULT", per_100_steps([(begun, time.time(), job["steps"])]), flush=True)
    jax.distributed.shutdown()


def exchange_of(job):
    return METHODS[job["method"]][1] if job["method"] in METHODS else NONE["processes"]


def on_all(hosts, job):
    """Runs a job on every host and returns their results."""
    job = {**job, "addresses": [hosts.address(i) for i in range(HOSTS)]}
    jobs = [json.dumps({**job, "host": i}) for i in range(HOSTS)]
    started = [hosts.start(i, [*AGAIN, job], **PIPES) for i, job in enumerate(jobs)]
    return [result_of(process.communicate(timeout=900)[0]) for process in started]


def role_driver(job):
    """Drives Ray's workers, one on each host."""
    from lsgd_jax.asynchronous import ray_engine

    exchange, budget = exchange_of(job), job["method"] in METHODS
    budget = budget and METHODS[job["method"]][2]
    size, seconds = job["size"], job["seconds"]
    outcome = ray_engine.run(
        lambda i: make_training(size, seconds),
        lj.asynchronous.Pulls(exchange, budget=budget),
        HOSTS,
        1,
        job["steps"],
        options=ray_engine.Options(address=job["ray"], timeout=60),
    )
    owns = [tuple(map(float, state["own"])) for state in outcome.states]
    print("RESULT", per_100_steps(owns), flush=True)


def real_ray(hosts, address, job):
    command = [*AGAIN, json.dumps({**job, "ray": address, "host": None})]
    driver = hosts.start(0, command, **PIPES)
    return result_of(driver.communicate(timeout=900)[0])


def fastest(hosts, address, job, repeats, engine, method):
    """Returns seconds per 100 steps of the fastest of several real runs."""
    job = {**job, "method": method}
    if engine == "ray":
        return min(real_ray(hosts, address, job) for _ in range(repeats))
    return min(on_all(hosts, job)[0] for _ in range(repeats))


def result_of(output):
    return float(output.rpartition("RESULT")[2].split()[0])


def role_stream(job):
    """Sends to the next host, receives from the previous one, prints bytes per second."""
    me, count = job["host"], job["bytes"]
    listener = socket.create_server((job["addresses"][me], 7002))
    time.sleep(2)
    out = socket.create_connection((job["addresses"][(me + 1) % HOSTS], 7002))
    into, _ = listener.accept()
    begun = time.time()
    sender = threading.Thread(target=out.sendall, args=(bytes(count),))
    sender.start()
    left = count
    while left:
        left -= len(into.recv(2**20))
    sender.join()
    print("RESULT", count / (time.time() - begun), flush=True)


def bandwidth_of(hosts, rate):
    count = {"100mbit": 20_000_000}.get(rate, 100_000_000)
    return float(np.mean(on_all(hosts, {"stream": True, "bytes": count})))


# The simulation


def simulated(job, step, **network):
    """Returns simulated seconds per 100 steps, with these fields of `Network`."""
    kind, exchange, budget = METHODS[job["method"]]
    usual = lj.asynchronous.Network.named("ethernet-1g")
    ends = [[] for _ in range(HOSTS)]
    lj.asynchronous.simulator.run(
        make_training(job["size"], 0.0),
        lj.asynchronous.Pulls(exchange, budget=budget),
        HOSTS,
        1,
        job["steps"],
        dataclasses.replace(usual, **network),
        lj.asynchronous.Speeds(step),
        collectives=kind == "processes",
        observe=lambda worker: ends[worker.index].append(worker.transport.now()),
    )
    return per_100_steps([(end[WARM - 1], end[-1], len(end)) for end in ends])


def with_software(engine, bandwidth, cost):
    """Returns the network as an engine sees it, with the cost of its software.

    gloo processes one part of a buffer while another is in flight, so the slower of the two
    counts. Ray copies a vector before it sends it, which adds to the time.
    """
    if engine == "ray":
        return {"bandwidth": bandwidth, "overhead": cost}
    return {"bandwidth": 1 / max(1 / bandwidth, cost)}


def software(job, engine, step, bandwidth, real):
    """Returns the cost for which the simulation takes as long as an unlimited real run.

    It is in seconds per message on Ray, and in seconds per byte with gloo.
    """
    low, high = (0.0, 0.2) if engine == "ray" else (0.0, 1e-6)
    for _ in range(16):
        middle = (low + high) / 2
        if simulated(job, step, **with_software(engine, bandwidth, middle)) < real:
            low = middle
        else:
            high = middle
    return low


def main():
    words = parser(__doc__)
    words.add_argument("--role", help=argparse.SUPPRESS)
    words.add_argument("--rates", default="100mbit,1gbit")
    words.add_argument("--engines", default="processes,ray")
    words.add_argument("--step-ms", type=float, default=50.0)
    words.add_argument("--megabytes", type=float, default=4.0)
    words.add_argument("--steps", type=int, default=48)
    words.add_argument(
        "--repeats", type=int, default=3, help="real runs, of which the fastest counts"
    )
    options = words.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    if options.role:
        job = json.loads(options.role)
        if "stream" in job:
            return role_stream(job)
        return role_driver(job) if job["host"] is None else role_process(job)
    size = int(options.megabytes * 1e6 / 4)
    job = {"size": size, "seconds": options.step_ms / 1e3, "steps": options.steps}
    engines = options.engines.split(",")
    methods = [name for name, (engine, *_) in METHODS.items() if engine in engines]

    took = {}
    for rate in ("none", *options.rates.split(",")):
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(limited_hosts(HOSTS, rate))
            ray = None
            if "ray" in engines:
                ray = stack.enter_context(ray_on(hosts, store=True))
            real = functools.partial(fastest, hosts, ray, job, options.repeats)
            took[rate] = {name: real(METHODS[name][0], name) for name in methods}
            took[rate]["stream"] = bandwidth_of(hosts, rate)
            if rate == "none":
                steps = {engine: real(engine, "none") / 100 for engine in engines}
        print(rate, took[rate], steps, flush=True)
    head("method", "network", "real, s / 100 steps", "predicted", "difference")
    costs = {}
    for rate, name in itertools.product(took, methods):
        engine, own = METHODS[name][0], {**job, "method": name}
        found, bandwidth, step = took[rate][name], took[rate]["stream"], steps[engine]
        if engine not in costs:  # fitted to the engine's first method, so not a prediction
            costs[engine] = software(own, engine, step, bandwidth, found)
            continue
        predicted = simulated(own, step, **with_software(engine, bandwidth, costs[engine]))
        difference = f"{100 * (predicted - found) / found:+.0f} %"
        row(name, rate, f"{found:.2f}", f"{predicted:.2f}", difference)
    print(f"steps: {steps}; software: {costs}")


if __name__ == "__main__":
    main()
