"""Predicted and real seconds per 100 steps of 4 workers on a network that is limited.

    python benchmarks/simulated_against_real.py --rates 100mbit,1gbit

as root on Linux: makes 4 hosts of this machine (network namespaces on a bridge, each host's
uplink limited by tc's token bucket), trains on them 4 synchronous processes
(jax.distributed over gloo) and 4 asynchronous workers on Ray, and simulates the same. A
step sleeps for --step-ms, so that what is compared is the waiting, not the speed of a
shared CPU; the parameters are one vector of --megabytes.

What the simulator is told is measured apart from what it predicts: the time of a step in a
run without exchanges, the software's part of a message in a run of each engine's first
method without a limit, and the bandwidth by TCP streams from each host to the next.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


HOSTS, WARM = 4, 8  # steps at the start that are not counted: they compile
BURST = {"100mbit": "256kbit", "1gbit": "2mbit"}
NAME = "lsgdsim"
METHODS = {
    "all-reduce, every step": ("processes", lj.local_sgd(1), False),
    "lsgd, period 8": ("processes", lj.lsgd(0, 0.1, 8, 8), False),
    "async-lsgd, period 8": ("ray", lj.lsgd(0, 0.1, 8, 8), True),
    "overlapped lsgd, period 8, delay 4": ("ray", lj.lsgd(0, 0.1, 8, 8, delay=4), False),
}
NONE = {"processes": lj.local_sgd(10**6), "ray": lj.local_sgd(10**6)}


# Hosts


def hosts_up(rate):
    run = lambda line: subprocess.run(line.split(), check=True)
    run(f"ip link add {NAME} type bridge")
    run(f"ip link set {NAME} up")
    for i in range(HOSTS):
        host, address = f"{NAME}{i}", f"10.87.0.{i + 1}"
        run(f"ip netns add {host}")
        run(f"ip link add {NAME}v{i} type veth peer name {NAME}e{i}")
        run(f"ip link set {NAME}e{i} netns {host}")
        run(f"ip link set {NAME}v{i} master {NAME}")
        run(f"ip link set {NAME}v{i} up")
        inside = f"ip netns exec {host}"
        run(f"{inside} ip addr add {address}/24 dev {NAME}e{i}")
        run(f"{inside} ip link set {NAME}e{i} up")
        run(f"{inside} ip link set lo up")
        if rate != "none":
            limit = f"root tbf rate {rate} burst {BURST[rate]} latency 200ms"
            run(f"{inside} tc qdisc add dev {NAME}e{i} {limit}")
        folder = pathlib.Path("/etc/netns") / host
        folder.mkdir(parents=True, exist_ok=True)
        names = f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n"
        (folder / "hosts").write_text(names)


def hosts_down():
    run = lambda line: subprocess.run(line.split(), check=False, capture_output=True)
    for i in range(HOSTS):
        run(f"ip netns del {NAME}{i}")
        run(f"ip link del {NAME}v{i}")
        run(f"rm -rf /etc/netns/{NAME}{i}")
    run(f"ip link del {NAME}")


@contextlib.contextmanager
def hosts(rate, engines):
    hosts_down()
    hosts_up(rate)
    with contextlib.ExitStack() as stack:
        stack.callback(hosts_down)
        if "ray" in engines:
            stack.enter_context(ray_on_all_hosts())
        yield


def on_host(i, command, **options):
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{NAME}{i}", *command], start_new_session=True, **options
    )


# What is trained


def make_training(size, seconds):
    """Steps that sleep; `own` holds when they ended: the WARM-th, and the last one."""
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


# The two kinds of real runs, each in processes that this file starts with `--role`


def role_process(job):
    """One of the synchronous processes; the first prints seconds per 100 steps."""
    import jax as jax_

    jax_.distributed.initialize("10.87.0.1:7001", HOSTS, job["host"])
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
        jax_.block_until_ready(params)
        time.sleep(job["seconds"])
        if t == WARM:
            begun = time.time()
    if job["host"] == 0:
        print("RESULT", per_100_steps([(begun, time.time(), job["steps"])]), flush=True)
    jax_.distributed.shutdown()


def exchange_of(job):
    return METHODS[job["method"]][1] if job["method"] in METHODS else NONE["processes"]


def real_processes(job):
    jobs = [json.dumps({**job, "host": i}) for i in range(HOSTS)]
    command = [sys.executable, __file__, "--role"]
    pipes = dict(stdout=subprocess.PIPE, text=True)
    started = [on_host(i, [*command, job], **pipes) for i, job in enumerate(jobs)]
    return result_of([p.communicate(timeout=900)[0] for p in started][0])


def role_driver(job):
    """What drives Ray's workers, one on each host."""
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
        options=ray_engine.Options(address="10.87.0.1:6379", grace=60),
    )
    owns = [tuple(map(float, state["own"])) for state in outcome.states]
    print("RESULT", per_100_steps(owns), flush=True)


def real_ray(job):
    command = [sys.executable, __file__, "--role", json.dumps({**job, "host": None})]
    driver = on_host(0, command, stdout=subprocess.PIPE, text=True)
    return result_of(driver.communicate(timeout=900)[0])


@contextlib.contextmanager
def ray_on_all_hosts():
    """One cluster of Ray over the hosts."""
    ray = str(pathlib.Path(sys.executable).parent / "ray")
    store = f"--object-store-memory={500 * 2**20}"
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started = []
    try:
        for i in range(HOSTS):
            where = ["--head", "--port=6379"] if i == 0 else ["--address=10.87.0.1:6379"]
            address = f"--node-ip-address=10.87.0.{i + 1}"
            line = [ray, "start", *where, address, "--num-cpus=1", store, "--block"]
            line += ["--include-dashboard=false"] if i == 0 else []
            started.append(joined(i, line, quiet))
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        for process in started:
            process.wait(60)


def joined(i, line, options):
    """Ray on a host; tried again as long as the first host's is not there yet."""
    for _ in range(6):
        process = on_host(i, line, **options)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            return process
    raise RuntimeError(f"Ray does not start on host {i}: {' '.join(line)}")


def result_of(output):
    return float(output.rpartition("RESULT")[2].split()[0])


def role_stream(job):
    """Sends to the next host while the one before sends to this: bytes per second."""
    me, count = job["host"], job["bytes"]
    listener = socket.create_server((f"10.87.0.{me + 1}", 7002))
    time.sleep(2)
    out = socket.create_connection((f"10.87.0.{(me + 1) % HOSTS + 1}", 7002))
    into, _ = listener.accept()
    begun = time.time()
    sender = threading.Thread(target=out.sendall, args=(bytes(count),))
    sender.start()
    left = count
    while left:
        left -= len(into.recv(2**20))
    sender.join()
    print("RESULT", count / (time.time() - begun), flush=True)


def bandwidth_of(rate):
    count = {"100mbit": 20_000_000}.get(rate, 100_000_000)
    job = {"stream": True, "bytes": count}
    jobs = [json.dumps({**job, "host": i}) for i in range(HOSTS)]
    pipes = dict(stdout=subprocess.PIPE, text=True)
    command = [sys.executable, __file__, "--role"]
    started = [on_host(i, [*command, job], **pipes) for i, job in enumerate(jobs)]
    return float(np.mean([result_of(p.communicate(timeout=300)[0]) for p in started]))


# The simulation


def simulated(job, step, overhead, bandwidth):
    kind, exchange, budget = METHODS[job["method"]]
    network = dataclasses.replace(
        lj.asynchronous.Network.named("ethernet-1g"),
        bandwidth=bandwidth,
        overhead=overhead,
    )
    ends = [[] for _ in range(HOSTS)]
    lj.asynchronous.simulator.run(
        make_training(job["size"], 0.0),
        lj.asynchronous.Pulls(exchange, budget=budget),
        HOSTS,
        1,
        job["steps"],
        network,
        lj.asynchronous.Speeds(step),
        collectives=kind == "processes",
        observe=lambda worker: ends[worker.index].append(worker.ports.now()),
    )
    return per_100_steps([(end[WARM - 1], end[-1], len(end)) for end in ends])


def calibrated(job, step, bandwidth, real):
    """The overhead of a message with which the simulation takes as long as the real run."""
    low, high = 0.0, 0.1
    for _ in range(12):
        middle = (low + high) / 2
        if simulated(job, step, middle, bandwidth) < real:
            low = middle
        else:
            high = middle
    return low


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--engines", default="processes,ray")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
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

    def real(engine, method):
        run = {"processes": real_processes, "ray": real_ray}[engine]
        return min(run({**job, "method": method}) for _ in range(options.repeats))

    took = {}
    for rate in ("none", *options.rates.split(",")):
        with hosts(rate, engines):
            took[rate] = {name: real(METHODS[name][0], name) for name in methods}
            took[rate]["stream"] = bandwidth_of(rate)
            if rate == "none":
                steps = {engine: real(engine, "none") / 100 for engine in engines}
        print(rate, took[rate], steps, flush=True)
    print("| method | network | real, s / 100 steps | predicted | difference |")
    print("| --- | --- | --- | --- | --- |")
    overheads = {}
    for rate, name in itertools.product(took, methods):
        engine, own = METHODS[name][0], {**job, "method": name}
        found, bandwidth = took[rate][name], took[rate]["stream"]
        if engine not in overheads:  # measured with the first method, without a limit
            overheads[engine] = calibrated(own, steps[engine], bandwidth, found)
        predicted = simulated(own, steps[engine], overheads[engine], bandwidth)
        difference = f"{100 * (predicted - found) / found:+.0f} %"
        print(f"| {name} | {rate} | {found:.2f} | {predicted:.2f} | {difference} |")
    told = {k: f"{1e3 * v:.1f} ms" for k, v in overheads.items()}
    print(f"steps: {steps}; overhead of a message: {told}")


if __name__ == "__main__":
    main()
