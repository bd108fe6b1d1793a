"""Several workers on one device: the gain of `lj.unrolled` for convolutional networks.

    python benchmarks/shared_device.py [--models cnn7 resnet20] [--devices 1 2]

Four workers compute gradients of 64 images each on 1 and on 2 devices of this machine,
which are emulated on CPUs. The gradients are vmapped or unrolled by `lj.unrolled`, in
turns. The script prints a Markdown table of images per second (median and best), their
ratio and the seconds to compile.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import optax

import lsgd_jax as lj
from train.task.models import MODELS


WORKERS, BATCH, SHAPE = 4, 64, (32, 32, 3)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["cnn7", "resnet20"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument(
        "--json", type=pathlib.Path, help="write the measurements to this file"
    )
    return parser.parse_args()


def gradients(name, devices, wrap):
    """Returns a function that computes the gradients of all workers, and its arguments."""
    model = MODELS[name](num_classes=10)
    workers = lj.Workers(nodes=1, locals=WORKERS, devices=jax.devices()[:devices])
    keys = dict(
        zip(
            ("params", "dropout", "images", "labels"),
            jax.random.split(jax.random.key(0), 4),
        )
    )
    images = jax.random.normal(keys["images"], (WORKERS, BATCH, *SHAPE))
    labels = jax.random.randint(keys["labels"], (WORKERS, BATCH), 0, 10)
    start = dict(model.init(keys, images[0], train=False))
    params = start.pop("params")

    def step(params, stats, images, labels):
        def loss_of(params):
            logits, moved = model.apply(
                {"params": params, **stats},
                images,
                train=True,
                rngs={"dropout": keys["dropout"]},
                mutable=list(stats),
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), moved

        return wrap(jax.value_and_grad(loss_of, has_aux=True))(params)

    arguments = workers.replicate(params), workers.replicate(start)
    return workers.map(step), (*arguments, *workers.put((images, labels)))


def measure(name, devices, repetitions):
    """Returns images per second of every repetition and seconds to compile, by form."""
    forms = {"vmapped": lambda fn: fn, "unrolled": lj.unrolled}
    ready, rates, compiling = {}, {form: [] for form in forms}, {}
    for form, wrap in forms.items():
        begun = time.perf_counter()
        fn, arguments = ready[form] = gradients(name, devices, wrap)
        jax.block_until_ready(fn(*arguments))
        compiling[form] = time.perf_counter() - begun
    for _ in range(repetitions):
        for form, (fn, arguments) in ready.items():
            begun = time.perf_counter()
            jax.block_until_ready(fn(*arguments))
            rates[form].append(WORKERS * BATCH / (time.perf_counter() - begun))
    return rates, compiling


def main():
    options = parse()
    lj.emulate_devices(max(options.devices))
    lj.tune_cpu()
    print("| network | devices | vmapped, images/s | unrolled | ratio | compile, s |")
    print("|---|---|---|---|---|---|", flush=True)
    found = []
    for name in options.models:
        for devices in options.devices:
            rates, compiling = measure(name, devices, options.repetitions)
            found.append(dict(model=name, devices=devices, rates=rates, compile=compiling))
            vmapped, unrolled = rates.values()
            ratio = statistics.median(b / a for a, b in zip(vmapped, unrolled))
            cell = lambda x: f"{statistics.median(x):.0f} ({max(x):.0f})"
            seconds = " and ".join(f"{x:.1f}" for x in compiling.values())
            cells = [name, devices, cell(vmapped), cell(unrolled), f"{ratio:.2f}", seconds]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
