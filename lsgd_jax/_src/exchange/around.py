"""around: a method around a whole training step, (state, batch) -> (state, metrics).

A program keeps its parameters somewhere in its state, and its step returns the state
somewhere among its results. `Around` takes the parameters out, runs the method's pulls, and
puts them back.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.outer import Outer, OuterState, outer
from lsgd_jax._src.exchange.phases import Phase
from lsgd_jax._src.layouts import Specs, keys
from lsgd_jax._src.trees import Tree


Key = str | int
Path = Key | tuple[Key, ...]
Lens = tuple[Callable[[Tree], Tree], Callable[[Tree, Tree], Tree]]


class AroundState(NamedTuple):
    """The state of a step with a method around it.

    Attributes:
      state: the program's own state, as its step takes and returns it.
      outer: the method's state.
    """

    state: Tree
    outer: OuterState


class Around:
    """A training step with a method around it; `around` returns it.

    Attributes:
      outer: the method; ``outer.phase(t)`` is the phase of step t.
    """

    outer: Outer

    def __init__(
        self,
        step: Callable[..., Any],
        method: Exchange,
        params: Path | Lens,
        loss: Path | Callable[[Any], Any] | None,
        result: Path | None,
        specs: Specs,
    ):
        functools.update_wrapper(self, step)
        # `Workers.map(static='phase')` and `jax.jit` look the argument up in the signature.
        self.__signature__ = _with_phase(step)
        self.outer = outer(method, specs=specs)
        self._step, self._loss, self._result = step, loss, result
        self._params, self._with_params = _lens(params)

    def init(self, state: Tree) -> AroundState:
        """Returns the state before the first step, from the program's own state."""
        return AroundState(state, self.outer.init(self._params(state)))

    def __call__(
        self, state: AroundState, *args: Any, phase: Phase | None = None, **named: Any
    ) -> Any:
        """Returns the results of the step, with an `AroundState` in place of its state.

        Args:
          state: from `init` or the last call.
          args, named: the other arguments of the step, by position and by name.
          phase: see `Outer.step`.
        """
        if not isinstance(state, AroundState):
            raise ValueError(
                "`state` must be the `AroundState` that `init` made of the program's own "
                f"state, got {type(state).__name__}"
            )
        results = self._step(state.state, *args, **named)
        place = self._place(results, state.state)
        after, loss = at(results, place), self._loss_of(results, place)
        params, own = self.outer.step(
            self._params(after), state.outer, loss=loss, phase=phase
        )
        return put(results, place, AroundState(self._with_params(after, params), own))

    def _place(self, results: Any, state: Tree) -> tuple[Key, ...]:
        """The place of the state in the results: that of the one tree like it."""
        if self._result is not None:
            place = _path(self._result)
            try:
                at(results, place)
            except ValueError as error:
                raise ValueError(
                    "`result` must be the place of the state in the results of the step "
                    f"{_shown(results)}, such as result={_example(results)}, got "
                    f"result={self._result!r}: {error}"
                ) from None
            return place
        # The state may be the only result, or one of several; never deeper.
        places = [(), *((i,) for i in range(len(_children(results))))]
        alike = [place for place in places if _is_like(at(results, place), state)]
        if len(alike) == 1:
            return alike[0]
        raise ValueError(
            f"`result` must be the place of the state in the results of the step, because "
            f"{'several' if alike else 'none'} of them have its structure and shapes: a "
            f"position such as result=0, a name, or () if it is the only result; got "
            f"results {_shown(results)} for the state {_shown(state)}"
            f"{_first_difference([at(results, place) for place in places], state)}"
        )

    def _loss_of(self, results: Any, place: tuple[Key, ...]) -> Any:
        """The loss in the results, for the method."""
        if self._loss is None or callable(self._loss):
            return self._loss and self._loss(results)
        path, state = _path(self._loss), at(results, place)
        others = [x for _, x in _children(results) if place and x is not state]
        # A step that returns (state, loss) says with its shape where the loss is.
        is_lone = len(others) == 1 and getattr(others[0], "shape", None) == ()
        if is_lone and isinstance(self._loss, str):
            return others[0]  # the only scalar needs no name
        for tree in (results, *others):
            try:
                return at(tree, path)
            except ValueError:
                continue
        raise ValueError(
            "`loss` must be the place of the loss in the results of the step, a function "
            "of them, or None if there is none (the method then cannot know that it is "
            f"not finite), got loss={self._loss!r} for the results {_shown(results)}"
        )


def around(
    step: Callable[..., Any],
    method: Exchange,
    *,
    params: Path | Lens = "params",
    loss: Path | Callable[[Any], Any] | None = "loss",
    result: Path | None = None,
    specs: Specs = None,
) -> Around:
    r"""Puts a method around a training step of any framework, without changing the step.

    With s the program's state, y the parameters in it, and `outer` as described there:

    .. math::
      (s, m) &\leftarrow \text{step}(s, \ldots) \\
      y &\leftarrow \text{outer}(y, m_\text{loss})

    It is written for one worker, like the step, and runs wherever the step runs:
    under `Workers.map`, `jax.pmap`, `jax.vmap` or `jax.shard_map` with the method's axes.

    Places in a tree are names of fields, keys of a dict, or positions, and tuples of them
    for trees inside: ``"params"``, ``0``, ``("model", "params")``. A place of () is the
    tree itself.

    Args:
      step: takes the state as its first argument; returns the state, alone or among other
        results. The state is any pytree: a dataclass, a NamedTuple, a tuple, a dict, a
        Flax `TrainState`.
      method: any method that pulls, as for `outer`.
      params: the place of the parameters in the state, or a pair of functions
        (state -> params, (state, params) -> state).
      loss: the place of the loss in the results or in one of them, a function of the
        results, or None if the step returns no loss. If the step returns a scalar and the
        state, the scalar is the loss.
      result: the place of the state in the results. By default it is found: it is the one
        result with the structure and shapes of the state.
      specs: as for `outer`.

    Returns:
      An `Around`: called like the step, also with ``phase=``, with an `AroundState` in
      place of the program's state, which is its field `state`. ``init(state)`` makes it.

    Raises:
      ValueError: what `outer` refuses; while tracing, places that do not exist, and a state
        or a loss that are not found.

    >>> import jax, jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> def update(state, goal):  # of a program: it returns its state and metrics
    ...     loss, grad = jax.value_and_grad(lambda x: (x - goal) ** 2)(state["params"])
    ...     after = {"params": state["params"] - 0.1 * grad, "step": state["step"] + 1}
    ...     return after, {"loss": loss}
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> train = lj.around(update, lj.local_sgd(period=2))
    >>> start = workers.replicate({"params": jnp.float32(0), "step": 0})
    >>> state, step = workers.map(train.init)(start), workers.map(train)
    >>> for _ in range(2):
    ...     state, metrics = step(state, workers.put(jnp.array([1.0, 3.0])))
    ...     print(state.state["params"].round(2).tolist())
    [0.2, 0.6]
    [0.72, 0.72]
    """
    if not callable(step):
        raise ValueError(f"`step` must be a function, got {step=}")
    return Around(step, method, params, loss, result, specs)


# Places in a tree


def at(tree: Tree, path: tuple[Key, ...]) -> Tree:
    """Returns the tree at a place.

    >>> at({"a": (1, {"b": 2})}, ("a", 1, "b"))
    2
    """
    for key in path:
        children = _children(tree)
        tree = children[_index(children, key, tree)][1]
    return tree


def put(tree: Tree, path: tuple[Key, ...], value: Tree) -> Tree:
    """Returns the tree with another value at a place.

    >>> put({"a": (1, {"b": 2})}, ("a", 1, "b"), 3)
    {'a': (1, {'b': 3})}
    """
    if not path:
        return value
    children = _children(tree)
    i = _index(children, path[0], tree)
    inner = [child for _, child in children]
    inner[i] = put(inner[i], path[1:], value)
    return jax.tree.structure(tree, is_leaf=lambda node: node is not tree).unflatten(inner)


def _children(tree: Tree) -> list[tuple[str, Tree]]:
    """The names and values of the nodes below the top of a tree; none for a leaf."""
    below = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(keys(path)[0], child) for path, child in below if path]


def _index(children: list[tuple[str, Tree]], key: Key, tree: Tree) -> int:
    """The position of a child, by its name or its position."""
    names = [name for name, _ in children]
    if str(key) in names:
        return names.index(str(key))
    if isinstance(key, int) and 0 <= key < len(names):
        return key
    known = ", ".join(map(repr, names)) or "nothing"
    raise ValueError(
        f"a place must be a name or a position in its tree, got {key!r} for a "
        f"{type(tree).__name__} of {known}"
    )


def _path(place: Path) -> tuple[Key, ...]:
    return place if isinstance(place, tuple) else (place,)


def _lens(params: Path | Lens) -> Lens:
    """The functions that take the parameters out of a state, and put them back."""
    if isinstance(params, tuple) and any(map(callable, params)):
        return cast(Lens, params)
    path = _path(cast(Path, params))

    def get(state: Tree) -> Tree:
        try:
            return at(state, path)
        except ValueError as error:
            raise ValueError(
                "`params` must be the place of the parameters in the state "
                f"{_shown(state)}, such as params={_example(state)}, or a pair of "
                "functions (get, set), which may take several trees out of it and put them "
                f"back, got {params=}: {error}"
            ) from None

    return get, lambda state, value: put(state, path, value)


def _example(tree: Tree) -> str:
    """A place that the tree has, as one writes it."""
    names = [name for name, _ in _children(tree)]
    if not names:
        return "()"
    return "0" if names[0] == "0" else repr(names[0])


# Signatures and messages


def _with_phase(step: Callable[..., Any]) -> inspect.Signature:
    """The signature of the step with ``phase`` as a further argument by name."""
    signature = inspect.signature(step)
    parameters = [*signature.parameters.values()]
    rest = (
        [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    )
    phase = inspect.Parameter("phase", inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=[*parameters, phase, *rest])


def _is_like(tree: Tree, state: Tree) -> bool:
    """Whether a tree has the structure and the shapes of the state."""
    same = jax.tree.structure(tree) == jax.tree.structure(state)
    return same and all(
        np.shape(x) == np.shape(y)
        for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(state))
    )


def _first_difference(results: list[Tree], state: Tree) -> str:
    """Where the one result of the state's type begins to differ from it, for a message."""
    alike = [x for x in results if type(x) is type(state)]
    if len(alike) != 1:
        return ""
    tree, path = alike[0], ""
    while len(below := _children(tree)) == len(before := _children(state)):
        pairs = zip(below, before)
        different = [(x, y) for x, y in pairs if x[0] != y[0] or not _is_like(x[1], y[1])]
        if type(tree) is not type(state) or not different:
            break
        (name, tree), (_, state) = different[0]
        path = f"{path}/{name}" if path else name
    return f"; it differs first at {path!r}: {_shown(tree)} for {_shown(state)}"


def _shown(tree: Tree) -> str:
    """The top of a tree in a message."""
    children = _children(tree)
    if hasattr(tree, "dtype"):
        return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
    if not children:
        return repr(tree)
    inner = ", ".join(f"{name}: {type(child).__name__}" for name, child in children)
    return f"{type(tree).__name__}({inner})"
