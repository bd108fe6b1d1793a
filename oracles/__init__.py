"""Trajectories that every method must reproduce, from code that is not the library's.

index.json and its .npz files hold the methods up to 2023, methods_2026.json those of 2025
and 2026, and `by_hand` computes the rest in NumPy. `NAMES` lists all of them, and `load`
returns one. The CSV files hold trajectories of the paper's experiments on sinc.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import lsgd_jax as lj
from oracles import by_hand


FOLDER = pathlib.Path(__file__).parent
SETUP = ("method", "nodes", "locals", "steps", "lr")

Method = optax.GradientTransformationExtraArgs
Trees = Any  # a tree of float32 arrays, {name: [steps, W, ...]}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a method computes from given gradients.

    Attributes:
      name: the name of the case.
      method: the public name of the method, such as 'contrib.grawa'.
      nodes, locals: the grid of workers.
      tx: the method with its base optimizer.
      start: the initial parameters of all workers, {name: float32 [W, ...]}.
      gradients: {name: float32 [steps, W, ...]}.
      losses: float32 [steps, W].
      expected: the parameters after every step, {name: [steps, W, ...]}.
      rtol, atol: the tolerances of the comparison.
    """

    name: str
    method: str
    nodes: int
    locals: int
    tx: Method
    start: Trees
    gradients: Trees
    losses: np.ndarray
    expected: Trees
    rtol: float = 1e-5
    atol: float = 1e-6

    @property
    def workers(self) -> int:
        """The number of workers, W."""
        return self.nodes * self.locals


def at(trees: Trees, step: int) -> Any:
    """The tree of a step (from 0), {name: [W, ...]}."""
    return jax.tree.map(lambda x: x[step], trees)


def load(name: str) -> Case:
    """Returns a case.

    Raises:
      ValueError: an unknown name.
    """
    for names, of in _LOADERS:
        if name in names:
            return of(name)
    raise ValueError(f"`name` must be one of {', '.join(NAMES)}, got name={name!r}")


def as_float32(numbers: Any) -> np.ndarray:
    """The numbers in the precision in which the methods compute."""
    return np.asarray(numbers, np.float32)


# Methods up to 2023


INDEX = json.loads((FOLDER / "index.json").read_text())


def _of_index(name: str) -> Case:
    case = INDEX[name]
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)

    def tree(prefix: str) -> Trees:
        return {leaf: as_float32(arrays[f"{prefix}_{leaf}"]) for leaf in ("w", "b")}

    steps = case["steps"]
    first = functools.partial(jax.tree.map, lambda x: x[:steps])
    method, tx = _transformation(case)
    return Case(
        name,
        method,
        case["nodes"],
        case["locals"],
        tx,
        tree("x0"),
        first(tree("grads")),
        as_float32(arrays["losses"][:steps]),
        first(tree("params")),
    )


def _transformation(
    case: dict[str, Any],
) -> tuple[str, Method]:
    """The public name of the method of a case, and the method with SGD."""
    count = case["nodes"] * case["locals"]
    settings: dict[str, Any] = {k: x for k, x in case.items() if k not in SETUP}
    name = case["method"]
    base = optax.sgd(case["lr"])
    if name == "allreduce":
        return name, optax.chain(lj.allreduce(), base)
    if name in ("cge", "coordinate_median"):
        return f"robust.{name}", optax.chain(getattr(lj.robust, name)(**settings), base)
    if name == "dpsgd_ring":
        name = "dpsgd"
        settings = {"topology": lj.topology.ring(count)}
    if name in ("sgp", "osgp"):
        settings["topology"] = lj.topology.exponential(count)
    if name == "slowmo":
        settings["learning_rate"] = case["lr"]
    if name == "diloco":
        rate = settings.pop("outer_lr")
        momentum = settings.pop("outer_momentum")
        settings["outer"] = optax.sgd(rate, momentum=momentum, nesterov=True)
    return name, optax.chain(base, getattr(lj, name)(**settings))


# Methods of 2025 and 2026, on rows of 17 numbers


def _grawa(strength, period, level):
    return lj.contrib.grawa(strength, period, level == "layer")


def _edit(period, rate, momentum, alpha, level="model", **options):
    guard = lj.Guard(decay=alpha, layerwise=level == "layer", **options)
    return lj.diloco(period, optax.sgd(rate, momentum, nesterov=True), guard=guard)


def _decoupled(period, tokens, steps, merge):
    weights = tuple(n * n / k for n, k in zip(tokens, steps))
    merges: dict[str, Any] = {"rda": "radial", "avg": "mean"}
    return lj.diloco(period, merge=merges[merge], weights=weights)


def _sparseloco(k, chunk, period, decay, rate, bins=None, aggregate="mean"):
    bits = None if bins is None else bins.bit_length() - 1
    options: Any = k / chunk, chunk, bits, decay, aggregate
    return lj.contrib.sparse_diloco(period, rate, *options)


def _noloco(groups, momentum, rate, gamma, period):
    count = sum(map(len, groups[0]))
    edges = [[(i, j) for g in round for i in g for j in g if i != j] for round in groups]
    graph = lj.topology.matchings
    if count > 1:
        graph = lj.topology.from_edges(edges, count)
    return lj.contrib.noloco(period, momentum, rate, gamma, graph)


BUILD: dict[str, tuple[str, Callable[..., Any]]] = {
    "grawa": ("contrib.grawa", _grawa),
    "edit": ("diloco", _edit),
    "decoupled": ("diloco", _decoupled),
    "sparseloco": ("contrib.sparse_diloco", _sparseloco),
    "noloco": ("contrib.noloco", _noloco),
}
ROWS = json.loads((FOLDER / "methods_2026.json").read_text())
OF_ROWS = {
    f"{case['name']}-{case['workers']}": case
    for case in ROWS["cases"]
    if case["method"] in (*BUILD, "desloc")
}


def as_tree(rows: Any) -> Trees:
    """Rows of 17 numbers, [..., 17], as leaves of 3 x 4 and of 5."""
    rows = as_float32(rows)
    return {"a": rows[..., :12].reshape(*rows.shape[:-1], 3, 4), "b": rows[..., 12:]}


def _of_rows(name: str) -> Case:
    case = OF_ROWS[name]
    workers = case["workers"]
    given = ROWS["inputs"][str(workers)]
    gradients = np.array(given["gradients"])
    for t, i, factor in case.get("spikes", ()):
        gradients[t - 1, i] *= factor
    kind, options = case["base"]
    base = getattr(optax, kind)(options["lr"], *list(options.values())[1:])
    settings = dict(case["settings"])
    if case["method"] == "desloc":
        method = "contrib.desloc"
        tx = lj.contrib.desloc(base, settings.pop("params"), settings)
    else:
        method, build = BUILD[case["method"]]
        tx = optax.chain(base, build(**settings))
    is_odd = case["method"] in ("sparseloco", "noloco", "desloc")
    return Case(
        name,
        method,
        1,
        workers,
        tx,
        as_tree(np.tile(given["start"], (workers, 1))),
        as_tree(gradients),
        np.ones(gradients.shape[:2], np.float32),
        as_tree(case["params"]),
        rtol=0.0 if is_odd else 1e-5,
        atol=2e-5 if kind == "adam" else 2e-6,
    )


# The others


def _by_hand(name: str) -> Case:
    method, tx, compute, atol = by_hand.CASES[name]
    start, gradients = by_hand.inputs()
    return Case(
        name,
        method,
        *by_hand.GRID,
        tx,
        as_tree(start),
        as_tree(gradients),
        np.ones(gradients.shape[:2], np.float32),
        as_tree(compute(start, gradients)),
        atol=atol,
    )


_LOADERS = ((INDEX, _of_index), (OF_ROWS, _of_rows), (by_hand.CASES, _by_hand))
NAMES = tuple(name for names, _ in _LOADERS for name in names)
