"""Hosts on this machine joined by links of a limited rate. Needs Linux, root and iproute2.

Each host is a network namespace on one bridge. Its outgoing packets pass tc's token bucket.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lsgd_jax as lj
from train.cluster import rendezvous
from train.cluster.session import Session
from train.config import Config, DistributedConfig


PORT = 29400  # of the coordinator
TAG = os.getpid() % 10_000  # makes the names of namespaces and links unique
RAY_PORT = 6379
PREFIXES = {"g": 1e9, "m": 1e6, "k": 1e3}
# Larger messages go through object stores, where crossing pulls stall for a second.
INLINE = '--system-config={"max_direct_call_object_size": 8000000}'


def bits_of(rate: str) -> float:
    """Returns bits per second of a rate as tc writes it, such as 100mbit; "none": inf."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([gmk])bit", rate)
    if rate != "none" and found is None:
        raise ValueError(f"the rate must be none or one such as 100mbit, got {rate}")
    return float(found[1]) * PREFIXES[found[2]] if found else math.inf


class Hosts:
    """Running hosts."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def address(self, i: int) -> str:
        """Returns the address of host i."""
        return f"10.77.0.{i + 1}"

    def start(self, i: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Starts a command on host i."""
        inside = ["ip", "netns", "exec", self.names[i]]
        return subprocess.Popen([*inside, *command], start_new_session=True, **options)

    @contextlib.contextmanager
    def run_again(self, **options: Any) -> Iterator[list[subprocess.Popen]]:
        """Runs this program on every host, where it must `join`, until the context ends."""
        again = [sys.executable, *sys.argv, "--coordinator", f"{self.address(0)}:{PORT}"]
        hosts = range(len(self.names))
        processes = [self.start(i, [*again, "--worker", str(i)], **options) for i in hosts]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()


def run_limited(count: int, rate: str) -> int:
    """Runs this program on `limited_hosts`, and returns the highest of their statuses."""
    with limited_hosts(count, rate) as hosts:
        with hosts.run_again() as processes:
            return max(process.wait() for process in processes)


def work_or_run(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    count: int,
) -> None:
    """Does the work of one of the hosts that `run_limited` started, or starts them.

    Args:
      parser: that of the program's options, to which it adds the rate of the links.
      work: what each host does with the options.
      count: the number of hosts.
    """
    parser.add_argument(
        "--rate", default="100mbit", help="of each link as tc writes it, or none"
    )
    add_options(parser)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    sys.exit(run_limited(count, options.rate))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options by which `run_again` tells a program its host."""
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)


def join(config: Config, options: argparse.Namespace, hosts: int, each: int = 1) -> Session:
    """Joins the processes of `run_again`.

    each: the number of devices of a process.
    """
    distributed = DistributedConfig(
        coordinator=options.coordinator, num_processes=hosts, process_id=options.worker
    )
    os.environ["JAX_NUM_CPU_DEVICES"] = str(each)  # by which `join` leaves them alone
    lj.emulate_devices(each)
    return rendezvous.join(dataclasses.replace(config, distributed=distributed))


@contextlib.contextmanager
def limited_hosts(count: int, rate: str) -> Iterator[Hosts]:
    """Starts hosts that send at most at a rate, given as tc writes it, or "none"."""
    if os.getuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("error: limited hosts need Linux, root, and iproute2", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes the hosts down
    hosts = Hosts([f"lsgd{TAG}-{i}" for i in range(count)])
    bridge = f"lsgd{TAG}"
    folders = [pathlib.Path("/etc/netns") / name for name in hosts.names]
    # The bucket must hold what the link sends between two ticks of the kernel's clock.
    burst = "2mbit" if rate.endswith("gbit") else "256kbit"
    limit = f"root tbf rate {rate} burst {burst} latency 200ms".split()
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for i, (name, folder) in enumerate(zip(hosts.names, folders)):
            outside = f"v{TAG}-{i}"
            inside = f"e{TAG}-{i}"
            within = ("-n", name)
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip(*within, "addr", "add", f"{hosts.address(i)}/24", "dev", inside)
            _ip(*within, "link", "set", inside, "up")
            _ip(*within, "link", "set", "lo", "up")
            if rate != "none":
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", inside, *limit)
            folder.mkdir(parents=True)  # gloo listens at the address of the host's name
            own = f"127.0.0.1 localhost\n{hosts.address(i)} {socket.gethostname()}\n"
            (folder / "hosts").write_text(own)
        yield hosts
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one leaves no hosts behind
        for name, folder in zip(hosts.names, folders):
            _ip("netns", "del", name, check=False)
            shutil.rmtree(folder, ignore_errors=True)
        _ip("link", "del", bridge, check=False)


@contextlib.contextmanager
def ray_on(hosts: Hosts, store: bool = False) -> Iterator[str]:
    """Starts one Ray cluster over all hosts, with one CPU each, and yields its address.

    store: whether large messages go through the object stores, which is Ray's default.
    """
    address = f"{hosts.address(0)}:{RAY_PORT}"
    started = []
    try:
        for i in range(len(hosts.names)):
            first = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            first += [] if store else [INLINE]
            words = first if i == 0 else [f"--address={address}"]
            words += [f"--node-ip-address={hosts.address(i)}", "--num-cpus=1", "--block"]
            started.append(_joined(hosts, i, [*words, "--object-store-memory=500000000"]))
        yield address
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        for process in started:
            process.wait(60)


def _joined(hosts: Hosts, i: int, words: Sequence[str]) -> subprocess.Popen:
    """Starts Ray on host i, with retries until the first host's Ray is up."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for _ in range(6):
        process = hosts.start(i, ray, env=os.environ | own, **quiet)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
            time.sleep(2)
            continue
        return process
    raise RuntimeError(f"Ray does not start on host {i}: {' '.join(ray)}")


def _ip(*words: object, check: bool = True) -> None:
    """Runs `ip`; with check=False it may fail, without output."""
    errors = None if check else subprocess.DEVNULL
    subprocess.run(["ip", *map(str, words)], check=check, stderr=errors)
