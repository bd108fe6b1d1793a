"""outer: the kernel in lock step, around the training step of any framework.

It is the counterpart of `exchange` for training steps that return new parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from lsgd_jax._src import layouts, trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_same_tree
from lsgd_jax._src.exchange import exchange as lock_step
from lsgd_jax._src.exchange.exchange import Exchange, InPhases
from lsgd_jax._src.exchange.noted import note
from lsgd_jax._src.exchange.own_step import Alone, Counts, Remembered, Stepped
from lsgd_jax._src.exchange.phases import QUIET, Known, Phase
from lsgd_jax._src.exchange.replicas import Rows
from lsgd_jax._src.exchange.rule import NO_EXTRAS, Extras
from lsgd_jax._src.exchange.step import ExchangeState, Step
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.layouts import Specs
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


class OuterState(NamedTuple):
    """The state of an `outer`.

    Attributes:
      exchange: the pulls' states; `misplaced` counts the due pulls that ``due=False``
        omitted.
      before: x, the parameters that the last `step` returned, if a rule depends on x or
        every step is checked; otherwise (); per worker.
    """

    exchange: ExchangeState
    before: Tree | tuple[()]


class AroundState(NamedTuple):
    """The state of a step with a method around it.

    Attributes:
      state: the program's own state, as its step takes and returns it.
      outer: the method's state; of nested ones a tuple of all, the inner ones first.
    """

    state: Tree
    outer: OuterState | tuple[OuterState, ...]


def check_around_state(state: Any) -> None:
    """Raises ValueError unless it is an `AroundState`."""
    if not isinstance(state, AroundState):
        raise ValueError(
            "`state` must be the `AroundState` that `init` made of the program's own "
            f"state, got {type(state).__name__}"
        )


class Outer(InPhases):
    """A method around a training step; `outer` returns it.

    Attributes:
      method: the method that pulls.
      pulls: its pulls.
      specs: how parameters lie on the mesh axes inside a worker, or None.
      remembers: whether the state has a copy of the parameters, `OuterState.before`.
    """

    def __init__(self, method: Exchange, specs: Specs = None):
        self.method = method
        self.pulls = method.pulls
        self.specs = specs
        self.remembers = method.reads_x

    def __repr__(self) -> str:
        rules = ", ".join(f"every {pull.every}" for pull in self.pulls)
        return f"outer({len(self.pulls)} pulls: {rules})"

    @with_automatic_axes
    def init(self, params: Tree) -> OuterState:
        """Returns the state before the first step.

        Call it inside a function of one worker, where starts may differ, or outside of all
        mapped functions, where all workers start from these parameters.
        """
        return self._of_one_worker(self._start, trees.arrays(params))

    def _start(self, params: Tree) -> OuterState:
        state: Any = self.method.init(params)
        before = trees.floats(params) if self.remembers else ()
        # () and not an array of size 0, on which a `shard_map` of jax 0.11.2 crashes.
        return trees.with_own_buffers(
            OuterState(state._replace(expected=()), before), params
        )

    @with_automatic_axes
    def step(
        self,
        params: Tree,
        state: OuterState,
        *,
        loss: Any = None,
        value: Any = None,
        grad: Tree | None = None,
        due: bool | None = None,
        phase: Phase | None = None,
    ) -> tuple[Tree, OuterState]:
        """Returns the parameters and the state after the pulls that are due at this step.

        Args:
          params: y, the parameters that the training step returned.
          state: the state from `init` or the last step.
          loss: the loss of this step, a scalar. Methods that elect a leader need it, and a
            worker whose loss is not finite is left out.
          value: another name for `loss`.
          grad: the gradient of this step, a tree like the parameters, for methods that
            read it.
          due: True or False compiles the step with or without the pulls (see `is_due`).
            With None, the step count in the state decides at run time.
          phase: what `phase(t)` returned for this step: exactly that is compiled, without
            a conditional. A static value of the compiled function.

        Raises:
          ValueError: parameters or a state of another structure or shape than those of
            `init`; no loss for a method that needs it.
        """
        loss = lock_step.loss_of(value, loss)
        extras = lock_step.extras_of(self.pulls, trees.arrays(params), grad)
        known = Known.of(self.pulls, due, phase)
        step = functools.partial(self._step, known=known)
        is_silent = known.phase == QUIET
        return self._run(step, params, state, loss, extras, is_silent=is_silent)

    def _step(
        self, params: Tree, state: OuterState, loss: Any, extras: Extras, known: Known
    ) -> tuple[Tree, OuterState]:
        at = Step(self.pulls, state.exchange, known)
        y, exchange = at.take(self._own_step(params, state), loss, extras)
        before = y if self.remembers else ()
        return trees.refill(y, params), OuterState(exchange, before)

    def _own_step(self, params: Tree, state: OuterState) -> Remembered | Alone:
        """The training step that has returned these parameters."""
        y = trees.floats(params)
        if not self.remembers:
            return Alone(y)
        check_same_tree("params", y, state.before)
        return Remembered(state.before, y, self.method.check)

    @property
    def is_separable(self) -> bool:
        """Whether an exchange may be a program of its own, after that of the step.

        It is not if a rule depends on x, or if messages are to travel while the next
        gradient is computed.
        """
        return not (self.remembers or any(pull.delay for pull in self.pulls))

    @with_automatic_axes
    def defer(
        self, params: Tree, state: OuterState, *, loss: Any = None
    ) -> tuple[Tree, OuterState, Counts]:
        """`step` without its exchange, for any step of a method that is separable.

        Returns:
          (params, state, counts): counts: for each pull, whether loss and rule let this
          worker take part. `exchange` takes them if a pull is due at this step.
        """
        loss = lock_step.loss_of(None, loss)
        return self._run(self._defer, params, state, loss, is_silent=True)

    def _defer(
        self, params: Tree, state: OuterState, loss: Any
    ) -> tuple[Tree, OuterState, Counts]:
        at = Step(self.pulls, state.exchange, Known())
        own = self._own_step(params, state)
        stepped = at.move(own, state.exchange.pulls, loss, NO_EXTRAS)
        exchange = at.defer(stepped.states)
        return trees.refill(stepped.u, params), OuterState(exchange, ()), stepped.counts

    @with_automatic_axes
    def exchange(
        self, params: Tree, state: OuterState, counts: Counts, *, phase: Phase
    ) -> tuple[Tree, OuterState]:
        """The exchange that `defer` has left out: afterwards all is as after `step`.

        Args:
          params, state, counts: what `defer` returned.
          phase: what ``phase(t)`` returned for the step.
        """
        known = Known.of(self.pulls, None, phase)
        exchange = functools.partial(self._exchange, known=known)
        is_silent = known.phase == QUIET
        return self._run(exchange, params, state, counts, is_silent=is_silent)

    def _exchange(
        self, params: Tree, state: OuterState, counts: Counts, known: Known
    ) -> tuple[Tree, OuterState]:
        before = state.exchange
        y = trees.floats(params)
        stepped = Stepped(
            x=y,
            u=y,
            is_update=False,
            states=tuple(before.pulls),
            counts=counts,
            is_finite=before.is_finite,
        )
        y, exchange = Step(self.pulls, before, known, is_deferred=True).arrive(stepped)
        return trees.refill(y, params), OuterState(exchange, ())

    def _run(
        self,
        fn: Callable[..., Tree],
        params: Tree,
        state: OuterState,
        *args: Any,
        is_silent: bool,
    ) -> Any:
        """fn(params, state, *args) of one worker, which exchanges unless it is silent."""
        params = trees.arrays(params)
        note((pull.rule.axes for pull in self.pulls), params, is_silent)
        with lock_step.naming_the_state(state, lambda: self.init(params)):
            return self._of_one_worker(fn, params, state, *args)

    def _of_one_worker(self, fn: Callable[..., Tree], params: Tree, *args: Any) -> Tree:
        """fn(params, *args); under a `jax.vmap` over replicas as on `Workers`."""
        known = layouts.TYPED.get()
        if self.specs is None and known is None:
            return fn(params, *args)
        axes = [axis for pull in self.pulls for axis in Group(pull.rule.axes).axes]
        rows = Rows.of(axes, self.specs)
        if rows is None:
            return fn(params, *args)
        known = rows.layouts(self.specs, params) if known is None else known
        return rows.run(fn, (params, *args), known)


@by_value
def outer(method: Exchange, *, specs: Specs = None) -> Outer:
    r"""Applies a method around any training step: parameters in, parameters out.

    With y the parameters after the training step, t = 1, 2, … the step, and for each pull
    of the method z its target, λ its strength, τ its period, o its offset, d its delay (see
    `exchange`):

    .. math::
      z &\leftarrow \text{agree}(y) && \text{if } t \equiv o - d \pmod \tau \\
      y &\leftarrow y + \lambda(t) \, (z - y) && \text{if } t \equiv o \pmod \tau

    On all other steps the parameters pass unchanged and nothing is communicated. The
    training step may use any optimizer, also one that is not from optax. The numbers are
    those of ``optax.chain(optimizer, method)``, but no chain can be in the wrong order.

    The state keeps a copy of x, the parameters before the training step, if the method's
    rule depends on x (``order="combine_then_adapt"``, `dpsgd`, `sgp`, `osgp`, `parle`,
    `grawa`) or with ``check="every_step"``. All other methods cannot undo a step: a worker
    that is not finite continues until the next pull restores it.

    Args:
      method: any method that pulls, with all its options. With ``axes=()`` the worker is
        alone in its group, so that ``outer(diloco(axes=()))`` is an outer optimizer around
        one worker and needs no axis.
      specs: how one worker's parameters lie on the mesh axes inside it, for a step under
        ``jax.vmap(axis_name=..., spmd_axis_name=...)``: a prefix tree of `PartitionSpec`s
        or `NamedSharding`s, or a function (path, leaf) -> spec. Shards then travel by
        themselves, as in `Workers`. `PartitionSpec`s need a `jax.set_mesh`. Explicit axes
        need no specs, and in `Workers` they have no effect.

    Returns:
      An `Outer`: ``init(params) -> state``, ``step(params, state, loss=...) -> (params,
      state)``, ``is_due(t) -> bool``.

    Raises:
      ValueError: an argument that is no method that pulls; while tracing, specs that do not
        fit the parameters, or that have no mesh.

    >>> import jax, jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> o = lj.outer(lj.local_sgd(period=2))
    >>> def train_step(x, state):
    ...     loss, gradient = jax.value_and_grad(lambda x: (x - 3.0) ** 2)(x)
    ...     return o.step(x - 0.1 * gradient, state, loss=loss)
    >>> x = workers.put(jnp.array([0.0, 8.0]))
    >>> state, step = workers.map(o.init)(x), workers.map(train_step)
    >>> for _ in range(2):
    ...     x, state = step(x, state)
    ...     print(x.round(3).tolist())
    [0.6, 7.0]
    [3.64, 3.64]
    """
    if not isinstance(method, Exchange):
        raise ValueError(
            "`method` must be a method that pulls, such as diloco(...), lsgd(...) or an "
            f"exchange(...), got method={method!r}"
        )
    return Outer(method, specs)
