"""Which values may differ between workers: an analysis of a function of one worker.

A branch that only some workers take must not contain collectives: those who are in it
would wait for the others forever. And what stands in a `Shared` must be equal on all
workers, since it is kept once. jax checks neither (`Workers` compiles with
``check_vma=False``, and the types that this leaves out forget the predicate of a `cond`).
So `Workers.map` traces the function for one worker and walks over its jaxpr once. Of every
value it works out the worker axes over which the value may differ:

- an argument: over all axes, a `Shared` one over those that it does not name; constants
  over none;
- `axis_index` over its axes; what `psum`, `pmin`, `pmax` and `all_gather` return over all
  their input differs over but their own axes; what other collectives return over
  their axes, too;
- what a branch or a loop returns also over the axes of its predicate;
- all else over the axes of its inputs.

One rule is optimistic: an argument that is an integer or a bool SCALAR for each worker is
taken to be equal on all workers. Wrappers such as `optax.MultiSteps` and
`optax.conditionally_transform` count steps in such leaves and branch on them. Likewise the
scalars in the `hyperparams` of `optax.inject_hyperparams`. Workers whose own counts or
hyperparameters differ, and which branch on them around an exchange, still hang; a predicate
computed from gradients, parameters, a loss or random keys is found.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, PartitionSpec

from lsgd_jax._src.shared import Shared, named
from lsgd_jax._src.trees import Tree


Axes = frozenset[str]

# These return values that are equal over their axes; other collectives return others to
# each worker.
UNIFYING = {
    "psum",
    "psum_invariant",
    "pmin",
    "pmax",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "pbroadcast",
}
# These name axes and send nothing.
SILENT = {"axis_index", "pvary"}


def trace(
    fn: Callable,
    args: Sequence[Tree],
    mesh: AbstractMesh,
    workers: Sequence[str],
) -> Tree:
    """Traces the function of one worker, and checks that it cannot hang.

    Args:
      fn: the function, written for one worker.
      args: trees of one worker's values: anything with a shape, a dtype and a weak type.
      mesh: one device for each worker along the axes of workers, and automatic axes.
      workers: the names of the axes of workers.

    Returns:
      The tree that fn returns, of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: a branch that may differ between workers which a collective inside
        connects, or a `Shared` that may not be equal where it says so.
    """
    one = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names=set(workers),
        check_vma=False,
    )
    traced, outputs = jax.make_jaxpr(one, return_shape=True)(*args)
    axes = frozenset(name for name in workers if mesh.shape[name] > 1)
    inputs = [_of_argument(*leaf, axes) for leaf in _claims(args, axes)]
    results = _Analysis(axes).outputs(traced.jaxpr, inputs)
    for (path, _, claim), found in zip(_claims(outputs, axes), results):
        if not found <= claim:
            raise ValueError(
                f"what stands in the `Shared` at {path} may differ between workers along "
                f"{_quoted(found - claim)}: compute it from what is equal on them (other "
                "`Shared` values, or the result of a collective such as `psum`), or return "
                "it outside of `Shared`"
            )
    return outputs


def _claims(tree: Tree, axes: Axes, start: str = "") -> Iterator[tuple[str, Any, Axes]]:
    """Yields (path, leaf, axes), where axes are the mesh axes over which it may differ."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, Shared)
    )
    for keys, node in nodes:
        path = start + jax.tree_util.keystr(keys)
        if isinstance(node, Shared):
            equal = axes if node.axes is None else frozenset(map(named, node.axes))
            yield from _claims(node.value, axes - equal, path + ".value")
        else:
            yield path, node, axes


def _of_argument(path: str, x: Any, claim: Axes, axes: Axes) -> Axes:
    """Over which axes an argument differs; the optimistic rule of the module applies."""
    counts = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    taken_equal = x.shape == () and (counts or ".hyperparams[" in path)
    return frozenset() if claim == axes and taken_equal else claim


class _Analysis:
    """One walk over a jaxpr. Every jaxpr in it is seen once for each kind of inputs."""

    def __init__(self, axes: Axes):
        self._axes = axes
        self._outputs: dict[tuple[Jaxpr, tuple[Axes, ...]], list[Axes]] = {}
        self._connected: dict[Jaxpr, Axes] = {}
        self._rules = {"cond": self._cond, "while": self._while, "scan": self._scan}

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
        """Over which axes the outputs may differ if the inputs differ over theirs."""
        key = (jaxpr, tuple(inputs))
        if key not in self._outputs:
            self._outputs[key] = self._walk(jaxpr, inputs)
        return self._outputs[key]

    def _walk(self, jaxpr: Jaxpr, inputs: Sequence[Axes]) -> list[Axes]:
        known = dict(zip(jaxpr.invars, inputs))

        def read(x: Any) -> Axes:
            return frozenset() if isinstance(x, Literal) else known.get(x, frozenset())

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            rule = self._rules.get(eqn.primitive.name, self._other)
            known.update(zip(eqn.outvars, rule(eqn, operands)))
        return [read(x) for x in jaxpr.outvars]

    def _other(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        name, results = _name(eqn), len(eqn.outvars)
        axes = self._named(eqn)
        together = frozenset().union(*operands)
        if axes and name in UNIFYING and eqn.params.get("axis_index_groups") is None:
            same = len(operands) == results
            return [x - axes for x in (operands if same else [together] * results)]
        if axes and name in SILENT and operands:
            return [together] * results
        for inner in jaxprs_of(eqn):
            if (len(inner.invars), len(inner.outvars)) == (len(operands), results):
                return self.outputs(inner, operands)
        return [together | axes] * results

    def _cond(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        predicate, *operands = operands
        branches = jaxprs_of(eqn)
        self._check(predicate, branches)
        results = [self.outputs(branch, operands) for branch in branches]
        return [predicate.union(*each) for each in zip(*results)]

    def _while(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        condition, body = (_open(eqn.params[f"{x}_jaxpr"]) for x in ("cond", "body"))
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        (of_condition, of_body) = operands[:first], operands[first:second]
        carry, before = operands[second:], None
        predicate: Axes = frozenset()
        while carry != before:
            before = carry
            (predicate,) = self.outputs(condition, of_condition + carry)
            after = self.outputs(body, of_body + carry)
            carry = [x.union(y, predicate) for x, y in zip(carry, after)]
        self._check(predicate, [condition, body])
        return carry

    def _scan(self, eqn: Any, operands: list[Axes]) -> list[Axes]:
        (body,) = jaxprs_of(eqn)
        # The names of the parameters that count these differ between versions of jax: what
        # is scanned over has one axis more outside than inside.
        kept = lambda outer, inner: sum(map(_same_rank, outer, inner))
        second = kept(eqn.invars, body.invars)
        first = second - kept(eqn.outvars, body.outvars)
        constants, xs = operands[:first], operands[second:]
        carry, before, after = operands[first:second], None, []
        while carry != before:
            before = carry
            after = self.outputs(body, constants + carry + xs)
            carry = [x | y for x, y in zip(carry, after)]
        return carry + after[len(carry) :]

    def _check(self, predicate: Axes, bodies: Sequence[Jaxpr]) -> None:
        """Raises ValueError if workers can part at a predicate, with collectives behind."""
        connected = frozenset().union(*map(self._connects, bodies))
        if predicate & connected:
            raise ValueError(
                "a branch that depends on a worker's own values contains collectives along "
                f"{_quoted(predicate & connected)}: workers that take different branches "
                "would wait for each other forever; put wrappers such as "
                "`apply_if_finite` around the base optimizer, not around the exchange, and "
                "branch on what is equal on all workers"
            )

    def _connects(self, jaxpr: Jaxpr) -> Axes:
        """The axes along which workers must meet to get through this jaxpr."""
        if jaxpr not in self._connected:
            found: Axes = frozenset()
            for eqn in jaxpr.eqns:
                if _name(eqn) not in SILENT and (axes := self._named(eqn)):
                    # XLA lets a permutation begin when every device of the mesh has come,
                    # also those of other groups.
                    found |= self._axes if _name(eqn) == "ppermute" else axes
                found = found.union(*map(self._connects, jaxprs_of(eqn)))
            self._connected[jaxpr] = found
        return self._connected[jaxpr]

    def _named(self, eqn: Any) -> Axes:
        """The worker axes that an equation names."""
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = named if isinstance(named, (tuple, list, set, frozenset)) else (named,)
        return self._axes & {name for name in named if isinstance(name, str)}


def _name(eqn: Any) -> str:
    return eqn.primitive.name.removesuffix("_start")


def _same_rank(x: Any, y: Any) -> bool:
    rank = lambda v: len(getattr(v.aval, "shape", ()))
    return rank(x) == rank(y)


def jaxprs_of(eqn: Any) -> list[Jaxpr]:
    """All jaxprs in an equation's parameters."""
    found = []
    for param in eqn.params.values():
        inner = param if isinstance(param, (tuple, list)) else (param,)
        found += [_open(x) for x in inner if isinstance(x, (Jaxpr, ClosedJaxpr))]
    return found


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _quoted(axes: Axes) -> str:
    return " and ".join(map(repr, sorted(axes, reverse=True)))
