"""Finds the values that may differ between workers in a function of one worker.

A branch that only some workers take must not contain collectives: the workers in it would
wait for the others forever. And a `Shared` must be equal on all workers, because it is
stored once. jax checks neither (`Workers` compiles with ``check_vma=False``, and the types
that this option checks ignore the predicate of a `cond`). So `Workers.map` walks once over
the jaxpr of one worker. For every value it computes the worker axes over which the value
may differ:

- an argument differs over all axes, a `Shared` argument over the axes that it does not
  name, and a constant over none;
- `axis_index` differs over its axes; a result of `psum`, `pmin`, `pmax`, `all_gather` and
  the library's own `known_equal` over the axes of the input without their own; a result of
  another collective over the axes of the input and its own;
- a result of a branch or a loop also differs over the axes of the predicate;
- each result of `optimization_barrier` differs over the axes of its own input;
- any other value differs over the axes of its inputs.

One rule is optimistic: an argument that is an integer or bool SCALAR for each worker is
assumed to be equal on all workers. Wrappers such as `optax.MultiSteps` and
`optax.conditionally_transform` count steps in such leaves and branch on them. The same
holds for the scalars in the `hyperparams` of `optax.inject_hyperparams`. Workers whose own
counts or hyperparameters differ, and that branch on them around an exchange, still hang. A
predicate computed from gradients, parameters, a loss or random keys is found.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lsgd_jax._src.shared import Shared, known_equal_p
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.collectives import parts_of, unsplit


Axes = frozenset[str]

# The results of these are equal over their axes; those of other collectives may differ.
UNIFYING = {
    "psum",
    "psum_invariant",
    "pmin",
    "pmax",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "pbroadcast",
    known_equal_p.name,
}
# These name axes but send nothing.
SILENT = {"axis_index", "pvary"}

DIVERGE = {"branch": "take different branches", "loop": "take more rounds than others"}


class LeafAxes(NamedTuple):
    """The worker axes over which a leaf may differ, by its place in a tree.

    Attributes:
      path: its path.
      axes: the axes of workers over which it may differ: none in a `Shared`.
    """

    path: str
    axes: Axes


def check(
    jaxpr: Jaxpr,
    args: Sequence[LeafAxes],
    outputs: Sequence[LeafAxes],
    axes: Mapping[str, int],
) -> None:
    """Checks that a function of one worker cannot hang, and that each `Shared` is equal.

    Args:
      jaxpr: the function, traced for one worker.
      args: the axes of its arguments, see `leaf_axes`.
      outputs: the same of its results.
      axes: the names and sizes of the axes of workers, on the mesh and vmapped.

    Raises:
      ValueError: a branch or a loop that may differ between workers that meet in one of its
        collectives, or a `Shared` that may differ over an axis that it names.
    """
    names = _larger(axes)
    inputs = list[Axes]()
    for (path, allowed), variable in zip(args, jaxpr.invars):
        x: Any = variable.aval
        counts = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
        # The module's optimistic rule.
        taken_equal = x.shape == () and (counts or ".hyperparams[" in path)
        inputs.append(frozenset() if allowed == names and taken_equal else allowed)
    results = _Analysis(names).outputs(jaxpr, inputs)
    for (path, allowed), found in zip(outputs, results):
        wrong = found - allowed
        if wrong:
            raise ValueError(
                f"the value in the `Shared` at {path} may differ between workers along "
                f"{_quoted(wrong)}: compute it from values that are equal on them "
                "(other `Shared` values, or the result of a collective such as `psum`), or "
                "return it outside of `Shared`; a program that puts the state of a step "
                "back on some workers, as loss scaling does, takes `lj.around(step, "
                "method)`, which keeps the method's state out of that"
            )


def leaf_axes(tree: Tree, axes: Mapping[str, int]) -> list[LeafAxes]:
    """Returns the path and the axes of each leaf of a tree; `axes` as for `check`."""
    return list(_leaf_axes(tree, _larger(axes)))


def _larger(axes: Mapping[str, int]) -> Axes:
    """The axes along which there are several workers."""
    return frozenset(name for name, size in axes.items() if size > 1)


def _leaf_axes(tree: Tree, axes: Axes, start: str = "") -> Iterator[LeafAxes]:
    """Yields the axes of each leaf: all of `axes`, but for those that a `Shared` names."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, Shared)
    )
    for keys, node in nodes:
        path = start + jax.tree_util.keystr(keys)
        if isinstance(node, Shared):
            named = axes if node.axes is None else chain(*map(parts_of, node.axes))
            equal = frozenset(named)
            yield from _leaf_axes(node.value, axes - equal, path + ".value")
        else:
            yield LeafAxes(path, axes)


class _Analysis:
    """One walk over a jaxpr that visits every inner jaxpr once for each kind of inputs."""

    def __init__(self, axes: Axes):
        self._axes = axes
        self._outputs: dict[tuple[Jaxpr, tuple[Axes, ...]], list[Axes]] = {}
        self._connected: dict[Jaxpr, Axes] = {}
        self._rules = {"cond": self._cond, "while": self._while, "scan": self._scan}

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
        """The axes over which the outputs may differ, given those of the inputs."""
        key = (jaxpr, tuple(inputs))
        if key in self._outputs:
            return self._outputs[key]
        known = dict(zip(jaxpr.invars, inputs))
        nowhere: Axes = frozenset()

        def read(x):
            return nowhere if isinstance(x, Literal) else known.get(x, nowhere)

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            rule = self._rules.get(eqn.primitive.name, self._other)
            known.update(zip(eqn.outvars, rule(eqn, operands)))
        self._outputs[key] = [read(x) for x in jaxpr.outvars]
        return self._outputs[key]

    def _other(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        name = _name(eqn)
        results = len(eqn.outvars)
        if name == "optimization_barrier":
            return operands
        axes = self._axes & axes_of(eqn)
        together = frozenset().union(*operands)
        if axes and name in UNIFYING and eqn.params.get("axis_index_groups") is None:
            each = operands if len(operands) == results else [together] * results
            return [x - axes for x in each]
        if axes and name in SILENT and operands:
            return [together] * results
        for inner in jaxprs_of(eqn):
            if (len(inner.invars), len(inner.outvars)) == (len(operands), results):
                return self.outputs(inner, operands)
        return [together | axes] * results

    def _cond(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        predicate, *operands = operands
        branches = jaxprs_of(eqn)
        self._check("branch", predicate, branches)
        results = [self.outputs(branch, operands) for branch in branches]
        return [predicate.union(*each) for each in zip(*results)]

    def _while(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        condition, body = (_open(eqn.params[f"{x}_jaxpr"]) for x in ("cond", "body"))
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        of_condition = operands[:first]
        of_body = operands[first:second]
        carry = operands[second:]
        before = None
        predicate: Axes = frozenset()
        while carry != before:
            before = carry
            (predicate,) = self.outputs(condition, of_condition + carry)
            after = self.outputs(body, of_body + carry)
            carry = [x.union(y, predicate) for x, y in zip(carry, after)]
        self._check("loop", predicate, [condition, body])
        return carry

    def _scan(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        (body,) = jaxprs_of(eqn)

        # Scanned arrays have one axis more outside than inside. Versions of jax differ in
        # the names of the parameters that count them.
        def rank(v):
            return len(getattr(v.aval, "shape", ()))

        def kept(outer, inner):
            return sum(rank(x) == rank(y) for x, y in zip(outer, inner))

        second = kept(eqn.invars, body.invars)
        first = second - kept(eqn.outvars, body.outvars)
        constants = operands[:first]
        xs = operands[second:]
        carry = operands[first:second]
        before = None
        after = []
        while carry != before:
            before = carry
            after = self.outputs(body, constants + carry + xs)
            carry = [x | y for x, y in zip(carry, after)]
        return carry + after[len(carry) :]

    def _check(self, kind: str, predicate: Axes, bodies: Sequence[Jaxpr]) -> None:
        """Raises ValueError if workers can diverge at a predicate before collectives."""
        connected = frozenset().union(*map(self._connects, bodies))
        if predicate & connected:
            raise ValueError(
                f"a {kind} that depends on a worker's own values contains collectives "
                f"along {_quoted(predicate & connected)}: workers that {DIVERGE[kind]} "
                "would wait for each other forever; put wrappers such as "
                "`apply_if_finite` around the base optimizer, not around the exchange, and "
                f"let values that are equal on all workers decide about the {kind}"
            )

    def _connects(self, jaxpr: Jaxpr) -> Axes:
        """The axes along which workers must meet to get through this jaxpr."""
        if jaxpr not in self._connected:
            found: Axes = frozenset()
            for eqn in jaxpr.eqns:
                axes = self._axes & axes_of(eqn)
                if axes and _name(eqn) == "ppermute":
                    # In XLA a permutation starts once every device of the mesh has
                    # arrived, including those of other groups.
                    found |= self._axes
                elif _name(eqn) not in SILENT:
                    found |= axes
                found = found.union(*map(self._connects, jaxprs_of(eqn)))
            self._connected[jaxpr] = found
        return self._connected[jaxpr]


def axes_of(eqn: Any) -> Axes:
    """The mesh axes and vmapped axes that an equation names."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, (tuple, list, set, frozenset)) else (named,)
    return frozenset(name for name in named if isinstance(name, str))


def _name(eqn: Any) -> str:
    return eqn.primitive.name.removesuffix("_start")


def jaxprs_of(eqn: Any) -> list[Jaxpr]:
    """All jaxprs in an equation's parameters."""
    found = []
    for param in eqn.params.values():
        inner = param if isinstance(param, (tuple, list)) else (param,)
        found += [_open(x) for x in inner if isinstance(x, (Jaxpr, ClosedJaxpr))]
    return found


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields all equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_of(eqn):
            yield from equations(inner)


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _quoted(axes: Axes) -> str:
    """The axes by their names outside of `Workers`, which may split them."""
    return " and ".join(map(repr, sorted(set(map(unsplit, axes)), reverse=True)))
