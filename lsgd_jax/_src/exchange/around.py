"""around: a method around a whole training step, (state, batch) -> (state, metrics).

A program keeps its parameters somewhere in its state, and its step returns the state
somewhere among its results. `Around` takes the parameters out, runs the method's pulls, and
puts them back.
"""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax

from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.loop import Loop
from lsgd_jax._src.exchange.outer import (
    AroundState,
    Outer,
    OuterState,
    check_around_state,
    outer,
)
from lsgd_jax._src.exchange.phases import QUIET, Phase, Sizes, skips_of
from lsgd_jax._src.exchange.rule import silent
from lsgd_jax._src.layouts import Specs, children
from lsgd_jax._src.trees import Tree


Key = str | int
Path = Key | tuple[Key, ...]
Places = Path | list[Path]
Lens = tuple[Callable[[Tree], Tree], Callable[[Tree, Tree], Tree]]


class Around:
    """A training step with a method around it; `around` returns it.

    Attributes:
      outer: the method; ``outer.phase(t)`` is the phase of step t. Of nested ones a
        tuple of all methods, the inner ones first.
    """

    outer: Outer | tuple[Outer, ...]

    def __init__(
        self,
        step: Callable[..., Any],
        method: Exchange,
        params: Places | Lens,
        loss: Path | Callable[[Any], Any] | None,
        result: Path | None,
        specs: Specs,
    ):
        functools.update_wrapper(self, step)
        self._params, self._with_params = _lens(params)
        self._own = outer(method, specs=specs)
        self._loss = loss
        self._result = result
        # The methods around one step, the inner ones first.
        inner = step._levels if isinstance(step, Around) else ()
        self._levels: tuple[Around, ...] = (*inner, self)
        self.outer = self.methods if inner else self._own
        self._step = step._step if isinstance(step, Around) else step
        # `Workers.map(static='phase')` and `jax.jit` look the argument up in the signature.
        self._phase_name, self.__signature__ = _with_phase(self._step)

    def init(self, state: Tree) -> AroundState:
        """Returns the state before the first step, from the program's own state."""
        params = self.params_of(state)
        _warn_of_a_second_iterate(state, params)
        each = [level._own.init(own) for level, own in zip(self._levels, params)]
        return AroundState(state, self._joined(each))

    def phase(self, step: int, sizes: Sizes | None = None) -> Any:
        """Returns the phase of a step, counted from 1, for the argument ``phase=``.

        It is what `Outer.phase` returns; of nested ones a tuple, one for each method.
        """
        return self._joined([level._own.phase(step, sizes) for level in self._levels])

    def __call__(self, state: AroundState, *args: Any, **named: Any) -> Any:
        """Returns the results of the step, with an `AroundState` in place of its state.

        Args:
          state: from `init` or the last call.
          args, named: the other arguments of the step, by position and by name.
          phase: what `phase(t)` returned, see `Outer.step`. It is called ``outer_phase`` if
            the step has an argument `phase` of its own.
        """
        phases = self._each("phase", named.pop(self._phase_name, None))
        before = self._states(state)
        results, place, losses = self._stepped(state, args, named)
        after = self._exchanged(at(results, place), before, losses, phases)
        return put(results, place, after)

    def skip(self, state: AroundState, *, phase: Any = None) -> AroundState:
        """Returns the state after a step without a gradient: the step is not called.

        Args:
          state: from `init` or the last call.
          phase: what `phase(t)` returned.
        """
        phases = self._each("phase", phase)
        before = self._each("state", state.outer)
        return self._exchanged(state.state, before, [None] * len(before), phases)

    def loop(
        self, compile: Callable[..., Any], *, sizes: Sizes | None = None, **options: Any
    ) -> Loop:
        """Returns the step for a loop on the host that knows which step is due.

        See `Workers.loop`. This form is for programs that map over the workers themselves:
        ``train.loop(functools.partial(jax.pmap, axis_name="batch"))``.

        Args:
          compile: from a function of one worker to the compiled one of all workers, whose
            arguments and results have the axis of the workers everywhere.
          sizes: the sizes of the workers' axes by name, see `Outer.phase`.
          **options: passed on to `compile` for the program of the step alone, such as
            ``donate_argnums=0``.

        Raises:
          ValueError: a method with steps without a gradient.
        """
        if any(skips_of(level._own.pulls) for level in self._levels):
            raise ValueError(
                "a loop needs a batch at each step, but this method has steps without a "
                "gradient: call the step if `phase(t).needs_gradient`, otherwise `skip`"
            )
        return Loop(self, compile, sizes, options)

    @property
    def methods(self) -> tuple[Outer, ...]:
        """The method of each level, the inner ones first."""
        return tuple(level._own for level in self._levels)

    def params_of(self, state: Tree) -> list[Tree]:
        """The parameters of each method in the program's state."""
        return [level._params(state) for level in self._levels]

    def at_counts(self, counts: Sequence[int], sizes: Sizes | None) -> tuple[Phase, ...]:
        """The phase of each method at the step after its count; see `Loop`."""
        pairs = zip(self._levels, counts)
        return tuple(level._own.phase(count + 1, sizes) for level, count in pairs)

    @property
    def is_separable(self) -> bool:
        """Whether its exchanges may be programs of their own, see `Outer.is_separable`.

        The own step of a rule comes after the exchanges of the methods inside of it.
        """
        outers = [level._own for level in self._levels]
        return all(own.is_separable for own in outers) and not any(
            pull.rule.step is not silent for own in outers[1:] for pull in own.pulls
        )

    def in_phases(self, phases: Sequence[Phase]) -> Callable[..., Any]:
        """The whole step for the phase of each method."""
        phase = {self._phase_name: self._joined([*phases])}

        @functools.wraps(self._step)
        def step(state: AroundState, *args: Any, **named: Any) -> Any:
            return self(state, *args, **named, **phase)

        return step

    def deferring(self) -> Callable[..., tuple[Any, Any]]:
        """The step without its exchange: its results, and what `exchange` needs of it."""

        @functools.wraps(self._step)
        def step(state: AroundState, *args: Any, **named: Any) -> tuple[Any, Any]:
            before = self._states(state)
            results, place, losses = self._stepped(state, args, named)
            inner = at(results, place)
            own = []
            counts = []
            for level, of_outer, loss in zip(self._levels, before, losses):
                params, of_outer, each = level._own.defer(
                    level._params(inner), of_outer, loss=loss
                )
                inner = level._with_params(inner, params)
                own.append(of_outer)
                counts.append(each)
            after = AroundState(inner, self._joined(own))
            return put(results, place, after), tuple(counts)

        return step

    def exchange(
        self, state: AroundState, counts: Any, phases: Sequence[Phase]
    ) -> AroundState:
        """The state after the exchange that `deferring` has left out.

        phases: of each method.
        """
        inner = state.state
        own = []
        for level, of_outer, each, phase in zip(
            self._levels, self._states(state), counts, phases
        ):
            if phase != QUIET:
                params, of_outer = level._own.exchange(
                    level._params(inner), of_outer, each, phase=phase
                )
                inner = level._with_params(inner, params)
            own.append(of_outer)
        return AroundState(inner, self._joined(own))

    def _stepped(
        self, state: AroundState, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, tuple[Key, ...], list[Any]]:
        """The results of the step, the place of its state, and the loss of each method."""
        results = self._step(state.state, *args, **named)
        given = [level for level in self._levels if level._result is not None]
        place = (given or self._levels)[0]._place(results, state.state)
        return results, place, [level._loss_of(results, place) for level in self._levels]

    def _states(self, state: Any) -> Sequence[OuterState]:
        """The state of each method."""
        check_around_state(state)
        return self._each("state", state.outer)

    def _exchanged(
        self,
        state: Tree,
        before: Sequence[OuterState],
        losses: Sequence[Any],
        phases: Sequence[Any],
    ) -> AroundState:
        """The program's state after all methods, the inner ones first."""
        own = []
        for level, of_outer, loss, phase in zip(self._levels, before, losses, phases):
            params, of_outer = level._own.step(
                level._params(state), of_outer, loss=loss, phase=phase
            )
            state = level._with_params(state, params)
            own.append(of_outer)
        return AroundState(state, self._joined(own))

    def _joined(self, each: list[Any]) -> Any:
        """The one of the only method, or a tuple of those of nested ones."""
        return tuple(each) if self._levels[1:] else each[0]

    def _each(self, name: str, joined: Any) -> Sequence[Any]:
        """The inverse of `_joined`; None stands for None of each method."""
        if not self._levels[1:]:
            return (joined,)
        if joined is None:
            return (None,) * len(self._levels)
        kinds = (Phase, OuterState)  # tuples themselves
        if not isinstance(joined, tuple) or isinstance(joined, kinds):
            given = type(joined).__name__
        elif len(joined) != len(self._levels):
            given = f"{len(joined)}"
        else:
            return joined
        raise ValueError(
            f"a step in {len(self._levels)} `around`s has as many methods, and `{name}` "
            "must be a tuple of one for each, as `phase(t)` and `init` of the step return "
            f"them, got {given}"
        )

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
        places = [(), *((i,) for i in range(len(children(results))))]
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
        path = _path(self._loss)
        state = at(results, place)
        others = [x for _, x in children(results) if place and x is not state]
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
    params: Places | Lens = "params",
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
    For a loop on the host `Workers.loop` and `Around.loop` compile the step once, and the
    exchanges as programs of their own.

    Places in a tree are names of fields, keys of a dict, or positions, and tuples of them
    for trees inside: ``"params"``, ``0``, ``("model", "params")``. A place of () is the
    tree itself.

    Args:
      step: takes the state as its first argument; returns the state, alone or among other
        results. The state is any pytree: a dataclass, a NamedTuple, a tuple, a dict, a
        Flax `TrainState`. It may be an `Around`: several methods then have their own
        parameters and periods (a generator and a discriminator), and the inner ones pull
        first.
      method: any method that pulls, as for `outer`.
      params: the place of the parameters in the state; a list of places, whose trees are
        exchanged as one, a list; or a pair of functions (state -> params, (state, params)
        -> state).
      loss: the place of the loss in the results or in one of them, a function of the
        results, or None if the step returns no loss. If the step returns a scalar and the
        state, the scalar is the loss.
      result: the place of the state in the results. By default it is found: it is the one
        result with the structure and shapes of the state.
      specs: as for `outer`.

    Returns:
      An `Around`: called like the step, also with ``phase=`` (``outer_phase=`` if the step
      has an argument `phase`), with an `AroundState` in place of the program's state, which
      is its field `state`. ``init(state)`` makes it, and ``phase(t)`` the phase.

    Raises:
      ValueError: what `outer` refuses; while tracing, places that do not exist or lie in
        one another, and a state or a loss that are not found.

    >>> import jax, jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> def update(state, goal):  # of a program: it returns its state and metrics
    ...     loss, grad = jax.value_and_grad(lambda x: (x - goal) ** 2)(state["params"])
    ...     after = {"params": state["params"] - 0.1 * grad, "step": state["step"] + 1}
    ...     return after, {"loss": loss}
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> train = lj.around(update, lj.local_sgd(period=2))
    >>> start = workers.replicate({"params": jnp.float32(0), "step": 0})
    >>> state, step = workers.map(train.init)(start), workers.loop(train)
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
        below = children(tree)
        tree = below[_index(below, key, tree)][1]
    return tree


def put(tree: Tree, path: tuple[Key, ...], value: Tree) -> Tree:
    """Returns the tree with another value at a place.

    >>> put({"a": (1, {"b": 2})}, ("a", 1, "b"), 3)
    {'a': (1, {'b': 3})}
    """
    if not path:
        return value
    below = children(tree)
    i = _index(below, path[0], tree)
    inner = [child for _, child in below]
    inner[i] = put(inner[i], path[1:], value)
    return jax.tree.structure(tree, is_leaf=lambda node: node is not tree).unflatten(inner)


def _index(below: list[tuple[str, Tree]], key: Key, tree: Tree) -> int:
    """The position of a child, by its name or its position."""
    names = [name for name, _ in below]
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


def _lens(params: Places | Lens) -> Lens:
    """The functions that take the parameters out of a state, and put them back."""
    if isinstance(params, tuple) and any(map(callable, params)):
        return cast(Lens, params)
    if isinstance(params, list):
        return _lens_of_several(params)
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
    names = [name for name, _ in children(tree)]
    if not names:
        return "()"
    return "0" if names[0] == "0" else repr(names[0])


def _lens_of_several(places: list[Path]) -> Lens:
    """The same for several places: the parameters are the list of their trees."""
    if not places or any(map(callable, places)):
        raise ValueError(
            "`params` must be a place, a list of at least one place, or a tuple of two "
            f"functions, got params={places!r}"
        )
    paths = list(map(_path, places))

    def get(state: Tree) -> list[Tree]:
        positions = [_positions(state, path) for path in paths]
        for (i, one), (j, other) in itertools.permutations(enumerate(positions), 2):
            if one == other[: len(one)]:
                raise ValueError(
                    "the places in `params` must not lie in one another, got "
                    f"{places[i]!r} and {places[j]!r}"
                )
        return [at(state, path) for path in paths]

    def with_params(state: Tree, values: list[Tree]) -> Tree:
        for path, value in zip(paths, values, strict=True):
            state = put(state, path, value)
        return state

    return get, with_params


def _positions(tree: Tree, path: tuple[Key, ...]) -> list[int]:
    """A place by positions alone, so that equal places have one form."""
    found = []
    for key in path:
        below = children(tree)
        found.append(_index(below, key, tree))
        tree = below[found[-1]][1]
    return found


# Signatures and messages


def _warn_of_a_second_iterate(state: Tree, params: list[Tree]) -> None:
    """Warns if the iterate z of schedule-free is not exchanged with the parameters."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    exchanged = set(map(id, jax.tree.leaves(params)))
    for node in filter(is_ours, jax.tree.leaves(state, is_leaf=is_ours)):
        if not all(id(z) in exchanged for z in jax.tree.leaves(node.z)):
            warnings.warn(
                "the state has `z` of optax.contrib.schedule_free, which drifts apart "
                "between workers unless it is exchanged with the parameters: name both "
                "places, such as params=['params', ('opt_state', 'z')]",
                stacklevel=3,
            )


def _with_phase(step: Callable[..., Any]) -> tuple[str, inspect.Signature]:
    """The name of the argument for a phase, and the signature of the step with it."""
    signature = inspect.signature(step)
    name = "outer_phase" if "phase" in signature.parameters else "phase"
    parameters = [*signature.parameters.values()]
    rest = []
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        rest = [parameters.pop()]
    phase = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    return name, signature.replace(parameters=[*parameters, phase, *rest])


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
    tree = alike[0]
    path = ""
    while type(tree) is type(state) and len(children(tree)) == len(children(state)):
        pairs = zip(children(tree), children(state))
        different = [(x, y) for x, y in pairs if x[0] != y[0] or not _is_like(x[1], y[1])]
        if not different:
            break
        (name, tree), (_, state) = different[0]
        path = f"{path}/{name}" if path else name
    return f"; it differs first at {path!r}: {_shown(tree)} for {_shown(state)}"


def _shown(tree: Tree) -> str:
    """The top of a tree in a message."""
    below = children(tree)
    if not below:
        return _named(tree) if hasattr(tree, "dtype") else repr(tree)
    inner = ", ".join(f"{name}: {_named(child)}" for name, child in below)
    return f"{type(tree).__name__}({inner})"


def _named(tree: Tree) -> str:
    """A tree inside another one in a message: an array by its shape, a dict by its keys."""
    if hasattr(tree, "dtype"):
        return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
    if isinstance(tree, dict):
        return f"dict({', '.join(map(str, tree))})"
    return type(tree).__name__
