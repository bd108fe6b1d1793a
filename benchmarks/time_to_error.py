"""Time to a test error on slow networks, beside PyTorch's DDP and local SGD.

    python benchmarks/races.py cifar10-cnn7 --data.dir CIFAR --batch-size 32 --steps 768 \\
        --test-every 128 --out RACES
    sudo "$(which python)" benchmarks/time_to_error.py RACES --error 55

In lock step the network does not change the computed values, so the steps to the error are
those of the race, interpolated between two tests. This script times the steps: 4 hosts,
network namespaces of this machine that send at a limited rate (Linux, root, iproute2),
train the methods in turns, on random images or the race's text. In each of --rounds turns a
method takes --blocks periods, and the median of its turns counts. Races on text need
--no-torch, and --error is in nats. PyTorch's DDP is assumed to need the steps of
all-reduce, and its local SGD those of ours. Both train the same network
(`torch_process.py`; --torch names a Python with PyTorch). The script prints tables of
milliseconds per step and seconds to the error. It writes time_to_error.png, the seconds
over the rate, into RACES.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys

from against_pytorch import Peers
from limited_hosts import add_options, bits_of, join, limited_hosts
from side_by_side import Trainer, on_random_images, steps_of
from usage import add_torch, head, one_line_errors, parser, row

from train.accept.turns import in_turns
from train.config import Config, settings
from train.metrics.drawing import plt, save, subplots
from train.process import compilation_cache
from train.run import folder
from train.task.experiment import Experiment


WORKERS = 4
WARM_UP = 8  # steps
TORCH = {"allreduce": ("PyTorch DDP", "ddp"), "local-sgd": ("PyTorch", "local-sgd")}


def runs_of(races):
    """Returns the runs of a race with their 'method', 'seed', 'steps' and 'values'."""
    return json.loads((races / "compare.json").read_text())


def configs_of(races) -> dict[str, Config]:
    """Returns the configuration of each method, from its run folders."""
    paths = {
        run["method"]: races / f"{run['method']}-{run['seed']}" for run in runs_of(races)
    }
    return {name: settings.read(path / folder.CONFIG) for name, path in paths.items()}


def steps_to(error, races):
    """Returns the mean steps of each method over its seeds, inf if one never gets there."""
    found = {}
    for run in runs_of(races):
        reached = crossing(error, run["steps"], run["values"])
        found.setdefault(run["method"], []).append(reached)
    return {name: statistics.mean(steps) for name, steps in found.items()}


def crossing(error, steps, values):
    """Returns the step at which the values reach the error, by linear interpolation."""
    before = None
    for step, value in zip(steps, values):
        value = math.inf if value is None else value
        if value <= error:
            if before is None or math.isinf(before[1]):
                return step
            return step - (step - before[0]) * (error - value) / (before[1] - value)
        before = step, value
    return math.inf


def trainer_of(config, session):
    """Returns the trainer of a race on CIFAR-10 or on text."""
    if config.data.name == "cifar10":
        return on_random_images(config, session)
    return Trainer(Experiment(config, session=session))


def work(options):
    """Runs on each host: times the methods in turns, each for a block of steps."""
    configs = configs_of(pathlib.Path(options.races))
    session = join(next(iter(configs.values())), options, WORKERS)
    compilation_cache.use(say=session.is_main)
    arms = {}
    blocks = {}
    for name, config in configs.items():
        arms[name] = trainer_of(config, session)
        blocks[name] = options.blocks * steps_of(config.method, WARM_UP)
    session.wait_for_all()
    times = in_turns(arms, options.rounds, blocks)
    if session.is_main:
        for name, milliseconds in times.items():
            print(json.dumps([name, statistics.median(milliseconds) / 1e3]), flush=True)


def ours(hosts, options):
    """Returns the seconds per step of each method."""
    with hosts.run_again(stdout=subprocess.PIPE, text=True) as processes:
        said, _ = processes[0].communicate()
        if any(process.wait() for process in processes):
            sys.exit("a host failed; its output is above")
    return dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))


def theirs(hosts, options):
    """Returns PyTorch's seconds per step by (label, method whose step count applies)."""
    found = {}
    for name, config in configs_of(pathlib.Path(options.races)).items():
        if config.method.name not in TORCH:
            continue
        label, method = TORCH[config.method.name]
        settings = dict(model=config.model, method=method, batch_size=config.batch_size)
        settings |= {"period": getattr(config.method, "period", 1), "start": hosts.start}
        with Peers(options.torch, "train", WORKERS, 1, **settings) as peers:
            peers.seconds_per_step(WARM_UP)
            steps = options.blocks * steps_of(config.method, WARM_UP)
            seconds = peers.seconds_per_step(steps)
        entrant = name.partition("-rate-")[0]
        found[label if method == "ddp" else f"{label} {entrant}", name] = seconds
    return found


def measure(rate, needed, options):
    """Returns seconds per step and seconds to the error of each method."""
    with limited_hosts(WORKERS, rate) as hosts:
        found = {(n.partition("-rate-")[0], n): s for n, s in ours(hosts, options).items()}
        if not options.no_torch:
            found |= theirs(hosts, options)
    return {label: (s, s * needed[name]) for (label, name), s in found.items()}


def main():
    words = parser(__doc__)
    words.add_argument("races", help="the folder that races.py wrote")
    words.add_argument(
        "--error", type=float, required=True, help="to reach: percent, or nats for text"
    )
    rates = ["1gbit", "100mbit", "10mbit"]
    each = "as tc writes it, or none"
    words.add_argument("--rates", nargs="+", metavar="RATE", default=rates, help=each)
    words.add_argument("--blocks", type=int, default=2, help="number of periods to time")
    words.add_argument("--rounds", type=int, default=1, help="number of turns")
    add_torch(words)
    words.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    add_options(words)
    options = words.parse_args()
    if not (pathlib.Path(options.races) / "compare.json").exists():
        words.error(
            f"{options.races} must be the folder of a race: compare.json is missing"
        )
    if options.worker is not None:
        return work(options)
    out = pathlib.Path(options.races)
    with one_line_errors():
        limited = {rate: bits_of(rate) / 1e6 for rate in options.rates if rate != "none"}
        needed = steps_to(options.error, out)
        configs_of(out)  # before any host is started
    found = {rate: measure(rate, needed, options) for rate in options.rates}
    for title, index, unit in (("a step, ms", 0, 1e3), ("to the error, s", 1, 1)):
        head(title, *found)
        for label in found[options.rates[0]]:
            numbers = (unit * found[rate][label][index] for rate in found)
            row(label, *(f"{n:.0f}" if math.isfinite(n) else "–" for n in numbers))
        print()
    if limited:
        draw(found, limited, out / "time_to_error.png")


def draw(found, mbits, path):
    """Draws the seconds to the error over the rate, for each method that reaches it."""
    figure, axes = subplots(figsize=(8, 5))
    colors = plt.get_cmap("tab20").colors
    for label, color in zip(next(iter(found.values())), colors):
        shown = {"color": color, "label": label, "marker": "o"}
        style = "--" if label.startswith("PyTorch") else "-"
        seconds = [found[rate][label][1] for rate in mbits]
        if all(map(math.isfinite, seconds)):
            axes.loglog(mbits.values(), seconds, style, **shown)
    axes.set_xlabel("what a host sends at most, Mbit/s")
    axes.set_ylabel("seconds to the error")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


if __name__ == "__main__":
    main()
