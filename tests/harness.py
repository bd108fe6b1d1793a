"""The table of methods, and small training runs that are compiled once per method."""

import dataclasses
import functools
import re
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from outside import ROOT, loaded

import lsgd_jax as lj
import oracles
from lsgd_jax._src.shared import REPAIR


graph = lj.topology


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    Attributes:
      make: (W, **check) -> the method's transformation.
      first: whether the method stands before the base optimizer.
      around: whether the method takes the base optimizer as a second argument of `make`.
      then: a transformation at the end of the chain, or None.
      alone: whether the method with one worker is exactly the base optimizer.
      due: the number of steps between exchanges.
      rounds: W -> for each pull, the number of graph rounds that are compiled.
      refuses: the numbers of workers in the tests that the method refuses.
      unsaid: bytes of branches that the payload does not count.
      loops: bytes of the iterations of a loop after the first one, which the program does
        not list.
      wires: whether the parameters may travel in a narrow format.
      lock_step: whether asynchronous workers refuse the method.
    """

    make: Callable[..., optax.GradientTransformationExtraArgs]
    first: bool = False
    around: bool = False
    then: optax.GradientTransformationExtraArgs | None = None
    alone: bool = True
    due: int = 1
    rounds: Callable[[int], tuple[int, ...]] = lambda W: (1,)
    refuses: tuple[int, ...] = ()
    unsaid: tuple[int, ...] = ()
    loops: int = 0
    wires: bool = True
    lock_step: bool = False

    def chain(self, W, base, **check):
        if self.around:
            return self.make(W, base, **check)
        tx = self.make(W, **check)
        chain = [tx, base] if self.first else [base, tx]
        return optax.chain(*chain, *([self.then] if self.then else []))


@functools.cache
def median_worker():
    """The rule that docs/writing_a_rule.md teaches."""
    return loaded(ROOT / "examples/pull_to_the_median_worker.py").median_worker()


SGD = optax.sgd(0.1)
hops = lambda W: (len(graph.exponential(W).rounds),)
pairs = lambda W: (len(graph.bipartite_exponential(W).rounds),)

# Soon warm, and with a threshold that some norms pass.
GUARD = lj.Guard(warmup=2, threshold=0.5, decay=0.3, clip=0.5)

METHODS = {
    "lsgd": Method(
        lambda W, **k: lj.lsgd(0.3, 0.2, 2, 4, loss_window=2, **k),
        due=2,
        rounds=lambda W: (1, 1),
    ),
    "easgd": Method(lambda W, **k: lj.easgd(0.5, 2, **k), due=2),
    "easgd_combine": Method(
        lambda W, **k: lj.easgd(
            lambda t: t.astype(float) / 10, 2, order="combine_then_adapt", **k
        ),
        due=2,
    ),
    "downpour": Method(lambda W, **k: lj.downpour(2, **k), due=2),
    "local_sgd": Method(lambda W, **k: lj.local_sgd(2, **k), due=2),
    "diloco": Method(lambda W, **k: lj.diloco(2, **k), due=2, alone=False),
    "diloco_streaming": Method(
        lambda W, **k: lj.diloco(4, fragments=2, delay=1, mixing=0.3, **k),
        due=2,
        alone=False,
        rounds=lambda W: (1, 1),
    ),
    "sparse_diloco": Method(
        lambda W, **k: lj.contrib.sparse_diloco(2, density=0.5, chunk=4, **k),
        due=2,
        alone=False,
        wires=False,
    ),
    "desloc": Method(
        lambda W, base=SGD, **k: lj.contrib.desloc(
            optax.chain(optax.trace(0.5), base), 2, {"trace": 4}, **k
        ),
        around=True,
        due=2,
        alone=False,
        rounds=lambda W: (1, 1),
    ),
    "palsgd": Method(
        # Steps 5, 7, 9 and 12 compute no gradient.
        lambda W, **k: lj.contrib.palsgd(2, 0.1, 0.4, 2.0, optax.sgd(0.5, 0.5), 5, **k),
        due=2,
        alone=False,
        lock_step=True,
    ),
    "noloco": Method(
        lambda W, **k: lj.contrib.noloco(2, topology=graph.matchings(W, rounds=2), **k),
        due=2,
        alone=False,
        rounds=lambda W: (2,),
    ),
    "sparta": Method(lambda W, **k: lj.contrib.sparta(0.5, **k), wires=False),
    "lsgd_streaming": Method(
        lambda W, **k: lj.lsgd(
            0.3, 0.2, 4, 8, 2, fragments=2, delay=2, late="add", scan_axis=0, **k
        ),
        due=2,
        alone=False,
        rounds=lambda W: (1, 1, 1, 1),
        lock_step=True,
    ),
    "slowmo": Method(
        lambda W, **k: lj.slowmo(2, 0.9, 0.5, lambda t: 1 / t, **k), due=2, alone=False
    ),
    "grawa": Method(
        lambda W, **k: lj.contrib.grawa(0.4, 2, decay=0.3, **k), due=2, lock_step=True
    ),
    "grawa+layers": Method(
        lambda W, **k: lj.contrib.grawa(
            0.4, 4, layerwise=True, fragments=2, delay=1, scan_axis=0, **k
        ),
        due=2,
        alone=False,
        rounds=lambda W: (1, 1),
        lock_step=True,
    ),
    "edit": Method(lambda W, **k: lj.diloco(2, guard=GUARD, **k), due=2, alone=False),
    "edit+layers": Method(
        lambda W, **k: lj.diloco(
            4,
            guard=dataclasses.replace(GUARD, layerwise=True),
            fragments=2,
            delay=1,
            mixing=0.3,
            restart=2,
            **k,
        ),
        due=2,
        alone=False,
        rounds=lambda W: (1, 1),
    ),
    "diloco+radial": Method(
        lambda W, **k: lj.diloco(
            2, merge="radial", weights=range(1, W + 1), restart=2, **k
        ),
        due=2,
        alone=False,
        unsaid=(44,),  # the mean, where directions cancel
        wires=False,
    ),
    "robust+pull": Method(
        lambda W, **k: lj.exchange(
            lj.Pull(lj.rules.robust_mean("krum"), 0.5, every=2), **k
        ),
        due=2,
        wires=False,
    ),
    "leaders+own": Method(
        lambda W, **k: lj.exchange(
            lj.Pull(lj.rules.leader(("node", "local"), window=2, keep=3), 0.5, every=2), **k
        ),
        due=2,
    ),
    "parle": Method(lambda W, **k: lj.parle(0.1, 2, decay=0.5, **k), due=2, alone=False),
    "dpsgd": Method(lambda W, **k: lj.dpsgd(graph.ring(W), **k)),
    "adpsgd": Method(
        lambda W, **k: lj.adpsgd(graph.bipartite_exponential(W), **k), rounds=pairs
    ),
    "sgp": Method(lambda W, **k: lj.sgp(graph.exponential(W), **k), rounds=hops),
    "osgp": Method(lambda W, **k: lj.osgp(graph.exponential(W), **k), rounds=hops),
    "osgp_delayed": Method(
        lambda W, **k: lj.osgp(graph.exponential(W), staleness=3, **k), rounds=hops
    ),
    "pairwise": Method(lambda W, **k: lj.pairwise(fetch_probability=0.7, **k), rounds=hops),
    "pairwise_clock": Method(lambda W, **k: lj.pairwise("clock", **k), rounds=hops),
    "pairwise_loss": Method(
        lambda W, **k: lj.pairwise("loss", divergence_threshold=2.0, **k), rounds=hops
    ),
    "gosgd": Method(
        lambda W, **k: lj.contrib.gosgd(send_probability=0.7, **k), rounds=hops
    ),
    "wagma": Method(
        lambda W, **k: lj.wagma(2, 3, **k), rounds=lambda W: (3, 1), refuses=(5,)
    ),
    "median_worker": Method(
        lambda W, **k: lj.exchange(lj.Pull(median_worker(), 0.5, every=2), **k),
        due=2,
        wires=False,
    ),
    "allreduce": Method(lambda W: lj.allreduce(), first=True),
    "post_local_sgd": Method(
        lambda W: lj.allreduce(until=3),
        first=True,
        then=lj.local_sgd(2),
        due=2,
        rounds=lambda W: (1, 1),
    ),
    "coordinate_median": Method(lambda W: lj.robust.coordinate_median(), first=True),
    "licm": Method(lambda W: lj.robust.licm(0.5), first=True),
    "robust+krum": Method(lambda W: lj.robust.krum(faulty=1, keep=6), first=True),
    "robust+geometric_median": Method(
        lambda W: lj.robust.geometric_median(), first=True, loops=31 * 3 * 8 * 4
    ),
    "robust+trimmed_mean": Method(lambda W: lj.robust.trimmed_mean(), first=True),
    "cge": Method(lambda W: lj.robust.cge(int(W > 1)), first=True),
    "cge_decay": Method(
        lambda W: lj.robust.cge(int(W > 1), decay=0.5), first=True, alone=False
    ),
}


# Every public factory of a method that pulls.
FACTORIES = [
    factory
    for name, factory in {**vars(lj), **vars(lj.contrib)}.items()
    if getattr(factory, "__annotations__", {}).get("return") is lj.Exchange
    and name != "exchange"
]


def needed(factory):
    """Returns the arguments that have no default."""
    arguments = {
        "parle": {"learning_rate": 0.1},
        "leader": {"axes": "local"},
        "scoping": {"initial": 0.1, "batches_per_epoch": 2},
        "Pull": {"rule": lj.rules.average(), "strength": 1.0},
    }
    return arguments.get(factory.__name__, {})


WIRES = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "stochastic": lj.Wire("int8", "stochastic", seed=1),
    "int8_across": lj.Wire("int8", across="node"),
}


def over(wire, method):
    """The row of a method whose parameters travel in a wire format."""
    if method.then:
        return dataclasses.replace(method, then=lj.local_sgd(2, wire=wire))
    return dataclasses.replace(method, make=functools.partial(method.make, wire=wire))


# Every method that pulls with int8, and some methods with each of the other formats.
METHODS |= {
    f"{name}+{wire}": over(WIRES[wire], METHODS[name])
    for wire, names in {
        "bfloat16": ("lsgd", "easgd", "sgp"),
        "int8": [n for n, m in METHODS.items() if (not m.first or m.then) and m.wires],
        "int4": ("lsgd", "diloco", "sgp", "wagma"),
        "stochastic": ("local_sgd", "osgp_delayed", "wagma"),
        "int8_across": ("diloco",),
    }.items()
    for name in names
}


# Rows of tests of every method
#
# Exact resume, the bytes sent and types that stay are tested for every row of METHODS, and
# the numbers of every method against oracles. Any other property needs the rows whose code
# differs: RULES for a property of the rules, KINDS for one of the kernel, the wire formats
# or the workers.

KINDS = {
    "lsgd": "elections on two levels",
    "lsgd_streaming": "both levels in fragments of stacked layers, in flight, added late",
    "easgd": "a center",
    "diloco_streaming": "an anchor and an outer optimizer in fragments, in flight",
    "desloc": "a method around the optimizer",
    "noloco": "an anchor of each worker",
    "sparse_diloco": "the largest elements",
    "grawa+layers": "weights of each layer from gradients",
    "robust+pull": "parameters that are gathered",
    "sgp": "pushes, which change the weights of the workers",
    "osgp_delayed": "messages that the rule itself keeps in flight",
    "pairwise": "pairs that are drawn, with losses",
    "wagma": "groups that change",
    "licm": "gradients that are gathered",
    "post_local_sgd": "means of gradients, then of parameters",
    "lsgd+bfloat16": "a narrow format without scales",
    "diloco+int4": "differences to an anchor in a narrow format",
    "sgp+int8": "differences to a reference in a narrow format",
    "wagma+stochastic": "draws in a narrow format",
    "diloco+int8_across": "a narrow format between nodes alone",
}
FORMATS = ("bfloat16", "int8", "int4", "stochastic", "int8_across")
RULES = [name for name in METHODS if name in KINDS or not name.endswith(FORMATS)]
# For properties that have nothing to do with formats.
EXACT_KINDS = [name for name in KINDS if not name.endswith(FORMATS)]
# Those whose messages differ most, for what a row takes seconds to show.
UNLIKE = (
    "lsgd diloco_streaming sparse_diloco robust+pull sgp wagma licm diloco+int4 sgp+int8"
).split()
# The rows of both that are tested by default.
FAST = "lsgd diloco_streaming sgp pairwise wagma licm diloco+int4".split()


def of_each(names, fast=FAST):
    """Parametrizes a test by the names of methods; all but the fast ones are marked slow.

    The tests of a method run one after the other, in one process, and share its programs.
    """
    return pytest.mark.parametrize("name", mostly_slow(names, fast), scope="session")


def in_turn(names, values):
    """Pairs of each name and one of the values, which take turns."""
    return [(name, values[i % len(values)]) for i, name in enumerate(names)]


def mostly_slow(cases, fast):
    """Cases of a parametrized test, all of which but the fast ones are marked slow."""
    values = lambda case: case if isinstance(case, tuple) else (case,)
    slow = lambda case: [] if case in fast else [pytest.mark.slow]
    return [pytest.param(*values(case), marks=slow(case)) for case in cases]


# Out-degrees 3, 1, 2, 2: push-sum weights move away from 1.
UNEQUAL = graph.from_edges(
    [[(0, 1), (0, 2), (0, 3), (1, 2), (2, 0), (2, 3), (3, 0), (3, 1)], [(0, 2), (1, 3)]]
)
# Columns sum to 1, and rows do not.
PUSH = np.array([[0.5, 0.2, 0, 0], [0.3, 0.8, 0.4, 0], [0.2, 0, 0.6, 0.1], [0, 0, 0, 0.9]])
PUSHED = graph.from_edges([[(0, 1), (0, 2), (1, 0), (2, 1), (3, 2)]], weights=[PUSH])

close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)


def mean(tree):
    """Returns the mean over the workers."""
    return jax.tree.map(lambda x: np.asarray(x).mean(axis=0), tree)


def everywhere(tree, W):
    """Returns a tree of W workers, each with a copy of this one."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (W, *x.shape)), tree)


def rule_of(state):
    """Returns the state of the rule in a chain of SGD and a method with one pull."""
    return state[1].pulls[0].rule


def mass(params, state):
    """Returns Σ s and Σ w of push-sum, including messages in flight."""
    target = rule_of(state)
    w = np.asarray(target.weight, np.float64)
    s = np.einsum("i,i...->...", w, np.asarray(params["w"], np.float64))
    for numerator, weight in getattr(target, "in_flight", ()):
        s = s + np.asarray(numerator["w"]).sum(axis=0)
        w = np.append(w, np.asarray(weight))
    return s, w.sum()


GUARDED = functools.partial(optax.apply_if_finite, max_consecutive_errors=1000)


COMPILED = {}  # the programs of `train`, which equal methods share


def train(
    tx,
    workers,
    x,
    batches,
    losses=None,
    apply=lj.apply_updates,
    gradient=lambda x, batch: batch,
    extra=lambda x, batch: {},
    state=None,
):
    """Returns the parameters on the host after every step, and the last state.

    batches: [W, ...] for each step, by default the gradients. losses: [W] for each step,
    by default 1. gradient: a worker's parameters and batch -> its gradient. extra: the same
    -> more arguments of `tx.update`. state: the state to continue from.
    """

    key = (tx, apply, gradient, extra, workers.mesh, workers.nodes, workers.locals)
    if key not in COMPILED:
        if len(COMPILED) == 64:
            COMPILED.clear()

        def step(x, state, batch, loss):
            g = gradient(x, batch)
            u, state = tx.update(g, state, x, value=loss, **extra(x, batch))
            return apply(x, u), state

        COMPILED[key] = workers.map(tx.init), workers.map(step)
    init, step = COMPILED[key]
    x, seen, compiled = workers.put(x), [], step._cache_size()
    state = init(x) if state is None else workers.put(state)
    losses = [np.ones(workers.num_workers)] * len(batches) if losses is None else losses
    for batch, loss in zip(batches, losses):
        loss = jnp.asarray(loss, jnp.float32)
        x, state = step(x, state, *workers.put((batch, loss)))
        seen.append(workers.fetch(x))
    assert step._cache_size() <= compiled + 1
    return seen, state


def around(outer, base=None):
    """Returns `lj.outer` around a base optimizer, for `train`, with `apply=after`."""
    base = optax.identity() if base is None else base

    def init(x):
        return base.init(x), outer.init(x)

    def update(g, state, x, value, **extra):
        u, of_base = base.update(g, state[0], x)
        y, of_outer = outer.step(optax.apply_updates(x, u), state[1], loss=value, **extra)
        return y, (of_base, of_outer)

    return optax.GradientTransformationExtraArgs(init, update)


def after(x, y):
    """The parameters that `around` returns."""
    return y


def exchanged(tx, workers, x, steps=1, state=None):
    """Returns the parameters on the host and the state after steps without gradients."""
    still = jax.tree.map(np.zeros_like, x)
    seen, state = train(tx, workers, x, [still] * steps, state=state)
    return seen[-1], state


@functools.cache
def aggregator(tx, count):
    workers = lj.Workers(1, count)
    return workers, workers.map(lambda g: tx.update(g, tx.init(g), g)[0])


def aggregate(tx, rows):
    """Returns the aggregate that each worker gets of gradients [W, ...]."""
    workers, update = aggregator(tx, len(jax.tree.leaves(rows)[0]))
    return update(workers.put(rows))


def check_found_by_optax(tx, workers, initable=None):
    """Asserts that `optax.tree_map_params` finds "w" and "b" wherever the state has them.

    initable: its first argument. Defaults to `tx`.
    """
    leaf = lambda *shape: jnp.ones((workers.num_workers, *shape))
    x = {"w": leaf(2, 3), "b": leaf(4), "count": leaf().astype(jnp.int32)}
    state = jax.eval_shape(workers.map(tx.init), x)
    masked = lambda node: isinstance(node, optax.MaskedNode)
    found = optax.tree_map_params(
        initable or tx,
        lambda leaf, name: leaf if masked(leaf) else name,
        state,
        {name: name for name in x},
        transform_non_params=lambda leaf: None,
        is_leaf=masked,
    )
    named = lambda path: path[-1].key if getattr(path[-1], "key", None) in x else None
    expected = jax.tree_util.tree_map_with_path(lambda path, _: named(path), state)
    assert found == expected and "w" in jax.tree.leaves(found)


# Trajectories of rows of 17 numbers, which are two leaves


def inputs_of(name):
    """Returns the start [W, 17] and the gradients [steps, W, 17] of a case on rows."""
    W = oracles.OF_ROWS[name]["workers"]
    given = oracles.ROWS["inputs"][str(W)]
    return np.tile(given["start"], (W, 1)), np.array(given["gradients"])


def as_rows(tree):
    return np.concatenate([np.reshape(tree[k], (len(tree[k]), -1)) for k in "ab"], axis=1)


def train_rows(tx, start, gradients, devices=8, **options):
    """Returns the parameters after every step, [steps, W, 17], and the last state."""
    workers = lj.Workers(1, len(start), devices=jax.devices()[: min(len(start), devices)])
    gradients = [oracles.as_tree(each) for each in gradients]
    seen, state = train(tx, workers, oracles.as_tree(start), gradients, **options)
    return np.stack([as_rows(x) for x in seen]), state


class Run:
    """A method over workers on devices, with its step compiled ahead of time.

    Each worker descends from its own start to its own target, which changes on every step:
    f(x) = |x - target|² / 2. The compiled step refuses arguments of another shape, dtype or
    sharding than those it was compiled for.
    """

    def __init__(
        self, tx, nodes, locals, devices, seed=0, dtype=jnp.float32, apply=lj.apply_updates
    ):
        self.W, self.tx = nodes * locals, tx
        self.workers = lj.Workers(nodes, locals, devices=jax.devices()[:devices])
        draw = np.random.default_rng(seed).normal
        start = {"w": draw(size=(self.W, 3, 2)), "b": draw(size=(self.W, 4))}
        self.start = jax.tree.map(lambda x: jnp.asarray(x, dtype), start)
        self.draw = lambda: jax.tree.map(
            lambda x: jnp.asarray(draw(size=x.shape), dtype), start
        )
        self.batches = [self.draw() for _ in range(8)]

        def train_step(params, state, target):
            def gradient(params):
                return jax.tree.map(jnp.subtract, params, target)

            norm = optax.tree.norm(gradient(params), squared=True)
            loss = norm.astype(jnp.float32) / 2
            updates, state = tx.update(gradient(params), state, params, value=loss)
            return apply(params, updates), state

        params = self.workers.put(self.start)
        self.init = self.workers.map(tx.init)
        self.step = self.workers.map(train_step)
        arguments = (params, self.init(params), self.workers.put(self.batches[0]))
        self.compiled = self.step.lower(*arguments).compile()
        self.text = self.compiled.as_text()

    @functools.cached_property
    def trained(self):
        return self.train()

    def train(self, batches=None, start=None):
        """Returns the parameters on the host after each step, and the last state."""
        params = self.workers.put(self.start if start is None else start)
        state, seen = self.init(params), []
        for batch in self.batches if batches is None else batches:
            params, state = self.compiled(params, state, self.workers.put(batch))
            seen.append(self.workers.fetch(params))
        return seen, state

    def still(self, steps, start):
        """Returns the parameters after each step with zero gradients, and the state."""
        params = self.workers.put(start)
        state, seen = self.init(params), []
        for _ in range(steps):
            params, state = self.compiled(params, state, params)
            seen.append(self.workers.fetch(params))
        return seen, state


def make(tx, W, **options):
    """Returns a run of SGD and a method over W workers of one node, each on its device."""
    return Run(optax.chain(SGD, tx), 1, W, devices=W, **options)


@functools.lru_cache(16)
def run_of(name, nodes, locals, devices, rate=0.1):
    """The form that the README recommends: a guarded base and `lj.apply_updates`."""
    tx = METHODS[name].chain(nodes * locals, GUARDED(optax.sgd(rate)))
    return Run(tx, nodes, locals, devices)


@functools.lru_cache(4)
def unguarded(name):
    """optax's own `apply_updates`, and a base optimizer that passes on nan."""
    tx = METHODS[name].chain(8, optax.sgd(0.1), check="every_step")
    return Run(tx, 4, 2, 8, apply=optax.apply_updates)


# Reading compiled HLO

COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)"
    r"(?:-start)?\("
)
SHAPE = re.compile(r"\b([a-z]+)(\d+)\[([\d,]*)\]")


def nbytes_of(shape):
    """The bytes of an HLO shape, tuples included."""
    return sum(
        int(bits) // 8 * int(np.prod([int(n) for n in dims.split(",") if n]))
        for _, bits, dims in SHAPE.findall(shape)
    )


def exchanges(text):
    """Returns the bytes that a compiled program sends: (on every step, in each branch).

    Both count the operand bytes of collectives. The first counts collectives outside of
    conditionals. The second is a list with one sum for every branch that has collectives.
    """
    bodies, current, entry = {}, None, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = header[2]
            bodies[current], entry = [], current if header[1] else entry
        elif current:
            bodies[current].append(line)

    sizes, calls, branches = {}, {}, []
    for name, lines in bodies.items():
        defined = {}
        sizes[name], calls[name] = 0, []
        for line in lines:
            made = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ", line)
            if not made:
                continue
            defined[made[1]] = made[2]
            if found := COLLECTIVE.search(line):
                operands = line[found.end() : line.index(")", found.end())]
                for operand in re.findall(r"%([\w.\-]+)", operands):
                    sizes[name] += nbytes_of(defined[operand])
            called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
            is_repair = " while(" in line and REPAIR in line  # without iterations
            calls[name] += [] if is_repair else called
            if " conditional(" in line:
                several = re.search(r"branch_computations=\{(.*?)\}", line)
                both = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
                branches += (
                    [b.strip().lstrip("%") for b in several[1].split(",")]
                    if several
                    else both
                )

    def reached(name):
        return sizes[name] + sum(reached(callee) for callee in calls[name])

    return reached(entry), sorted(n for n in map(reached, branches) if n)
