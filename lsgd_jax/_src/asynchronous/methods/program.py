"""A function traced once and cut at its messages, with parts that are compiled once each.

While a rule is traced, each message is one equation of its jaxpr. The equations between
two messages form a part. `SegmentedJaxpr.run` calls the compiled parts in order, awaits the
messages between them, and hands on what later parts read.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax.extend import core

from lsgd_jax._src.trees import Tree


Kind = Literal["gather", "broadcast", "sum", "permute"]


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a rule to its group.

    Attributes:
      kind: 'gather' (tree) -> rows of all; 'broadcast' (tree, source) -> tree; 'sum'
        (tree, where) -> (sums, count); 'permute' (tree, sources) -> tree.
      content: its arrays, a tree.
    """

    kind: Kind
    content: Any


MESSAGE = core.Primitive("message")
MESSAGE.multiple_results = True
MESSAGE.def_abstract_eval(lambda *content, answer, **params: answer)


def ask(kind: Kind, content: Tree, answer: Tree) -> Tree:
    """Sends a message in a traced function; returns its answer.

    Args:
      kind, content: see `Message`.
      answer: a tree of arrays or of their shapes and dtypes, like the answer.
    """
    leaves, treedef = jax.tree.flatten(content)
    likes, answered = jax.tree.flatten(answer)
    avals = tuple(jax.core.ShapedArray(like.shape, like.dtype) for like in likes)
    return answered.unflatten(
        MESSAGE.bind(*leaves, kind=kind, content=treedef, answer=avals)
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """The equations between two messages, one message, or branches with messages.

    Attributes:
      reads, writes: the variables that it reads, and those that it hands on.
      alive: the variables that are read after it.
      compute: the compiled equations, or None.
      branches: programs, of which the first variable read chooses one.
      equation: the message, or None.
    """

    reads: Sequence[Any]
    writes: Sequence[Any]
    alive: set[Any]
    compute: Callable[..., Sequence[Any]] | None = None
    branches: Sequence["SegmentedJaxpr"] = ()
    equation: Any = None


class SegmentedJaxpr:
    """A jaxpr, cut at its messages.

    Args:
      jaxpr: traced from a function that calls `ask`, also in branches of `lax.switch`.
    """

    def __init__(self, jaxpr: core.ClosedJaxpr):
        self._jaxpr = jaxpr.jaxpr
        self._consts = jaxpr.consts
        alive = set(_variables(self._jaxpr.outvars))
        self._parts = list[Part]()
        # From the end, because only later parts tell which variables are still read.
        for equations in reversed(list(_groups(self._jaxpr.eqns))):
            part = self._part(equations, frozenset(alive))
            self._parts.insert(0, part)
            alive = (alive - set(part.writes)) | set(_variables(part.reads))

    def _part(self, equations: Sequence[Any], alive: Any) -> Part:
        last = equations[-1]
        if last.primitive is MESSAGE:
            return Part(last.invars, last.outvars, alive, equation=last)
        if speaks(last):
            branches = list(map(SegmentedJaxpr, last.params["branches"]))
            return Part(last.invars, last.outvars, alive, branches=branches)
        own = [v for equation in equations for v in equation.outvars]
        writes = [v for v in own if v in alive]
        read = _variables(v for equation in equations for v in equation.invars)
        reads = [v for v in dict.fromkeys(read) if v not in set(own)]
        jaxpr = self._jaxpr.replace(
            constvars=[], invars=reads, outvars=writes, eqns=list(equations)
        )
        # Compiled, because equation by equation each one would be a dispatch of its own.
        compute = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, [])))
        return Part(reads, writes, alive, compute)

    async def run(
        self, args: Sequence[Any], answered: Callable[[Message], Awaitable[Tree]]
    ) -> list[Any]:
        """Returns the results.

        Args:
          args: the leaves of the function's arguments.
          answered: sends a message and returns its answer.
        """
        values = dict(zip(self._jaxpr.constvars, self._consts))
        values.update(zip(self._jaxpr.invars, args))

        def read(v):
            return v.val if isinstance(v, core.Literal) else values[v]

        for part in self._parts:
            given = list(map(read, part.reads))
            if part.compute is not None:
                found = part.compute(*given)
            elif part.branches:
                chosen, *operands = given
                found = await part.branches[int(chosen)].run(operands, answered)
            else:
                params = part.equation.params
                message = Message(params["kind"], params["content"].unflatten(given))
                found = jax.tree.leaves(await answered(message))
            values.update(zip(part.writes, found))
            # Drops what is not read again, such as gathered rows, as soon as possible.
            values = {v: x for v, x in values.items() if v in part.alive}
        return list(map(read, self._jaxpr.outvars))


def speaks(equation: Any) -> bool:
    """Whether an equation is a message, or a branch in which there is one."""
    if equation.primitive is MESSAGE:
        return True
    branches = equation.params.get("branches", ())
    return any(speaks(inner) for branch in branches for inner in branch.jaxpr.eqns)


def _groups(equations: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the equations between messages together, and each message alone."""
    between: list[Any] = []
    for equation in equations:
        if not speaks(equation):
            between.append(equation)
            continue
        if between:
            yield between
        between = []
        yield [equation]
    if between:
        yield between


def _variables(atoms: Any) -> list[Any]:
    return [v for v in atoms if not isinstance(v, core.Literal)]
