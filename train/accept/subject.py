"""What is timed and measured: a small language model whose workers exchange."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj
from train.task.transformer import Transformer


PERIOD = 64
METHODS = {
    "diloco": functools.partial(lj.diloco, PERIOD),
    "diloco, int8": functools.partial(lj.diloco, PERIOD, wire="int8"),
    "diloco, delay 1": functools.partial(lj.diloco, PERIOD, delay=1),
    "lsgd": functools.partial(lj.lsgd, 0.1, 0.1, PERIOD, PERIOD),
}


class Size(NamedTuple):
    """A network, and the batch of a worker."""

    network: Transformer
    batch: int


# A step takes some tens of milliseconds. On CPUs it is a test of this command.
ON_CPU = Size(Transformer(65, 64, 1, 4, 64), batch=8)
ON_ACCELERATOR = Size(Transformer(32768, 512, 8, 8, 512, dtype="bfloat16"), batch=16)


def is_on_cpu() -> bool:
    """Whether the devices are those of a CPU, which may be emulated."""
    return jax.default_backend() == "cpu"


def grid() -> tuple[int, int]:
    """The nodes and the workers of a node: one worker per device, or two on one device."""
    count = jax.device_count()
    processes = jax.process_count()
    return (1, 2) if count == 1 else (processes, count // processes)


class Subject:
    """A model with AdamW and a method, one worker per device.

    Args:
      name: the method, a key of `METHODS`.

    Attributes:
      method: the method.
      workers: the grid of workers.
      state: the parameters, AdamW's state and the method's state, of all workers.
      given: the tokens of all workers.
    """

    def __init__(self, name: str):
        size = ON_CPU if is_on_cpu() else ON_ACCELERATOR
        self._network = size.network
        self._base = optax.adamw(1e-3)
        self.method = METHODS[name]()
        self.workers = lj.Workers(*grid())
        params = self.workers.replicate(started(self._network))
        self.state = [
            params,
            self.workers.map(self._base.init)(params),
            self.workers.map(self.method.init)(params),
        ]
        shape = self.workers.num_workers, size.batch, size.network.context + 1
        tokens = np.random.default_rng(0).integers(0, size.network.vocabulary, shape)
        self.given = self.workers.put(tokens.astype(np.int32))
        self._programs: dict[Any, Any] = {}

    def phase(self, is_due: bool) -> lj.Phase:
        """The phase in which nothing is sent, or that in which most is sent and taken."""
        phases = self.method.phases(self.workers.sizes)
        if not is_due:
            return next(phase for phase in phases if phase.is_quiet)
        return max(phases, key=lambda phase: len(phase.sends) + len(phase.lands))

    def base(self) -> Any:
        """The compiled step of the base optimizer alone, which passes the rest through."""
        return self._compiled("base", self._base_step)

    def whole(self, phase: lj.Phase) -> Any:
        """The compiled step of one phase."""
        step = functools.partial(self._whole_step, phase=phase)
        return self._compiled(("whole", phase), step)

    def exchange(self, phase: lj.Phase) -> Any:
        """The compiled exchange of one phase, without a gradient and a base optimizer."""
        step = functools.partial(self._exchange_step, phase=phase)
        return self._compiled(("exchange", phase), step)

    def run(self, program: Any) -> None:
        """Takes a step, which changes the state."""
        self.state[:] = program(*self.state, self.given)

    def sent(self) -> int:
        """The bytes that a worker has sent so far, as the method counts them."""
        pulls = lj.diagnostics(self.workers.fetch(self.state[2]))
        return sum(pull.exchanges * pull.payload for pull in pulls)

    # The steps of one worker

    def _base_step(self, params: Any, inner: Any, outer: Any, tokens: Any) -> Any:
        _, gradient = self._gradient(params, tokens)
        updates, inner = self._base.update(gradient, inner, params)
        return optax.apply_updates(params, updates), inner, outer

    def _whole_step(
        self, params: Any, inner: Any, outer: Any, tokens: Any, *, phase: lj.Phase
    ) -> Any:
        loss, gradient = self._gradient(params, tokens)
        updates, inner = self._base.update(gradient, inner, params)
        updates, outer = self.method.update(updates, outer, params, value=loss, phase=phase)
        return lj.apply_updates(params, updates), inner, outer

    def _exchange_step(
        self, params: Any, inner: Any, outer: Any, tokens: Any, *, phase: lj.Phase
    ) -> Any:
        still = jax.tree.map(jnp.zeros_like, params)
        loss = tokens.min().astype(jnp.float32)
        updates, outer = self.method.update(still, outer, params, value=loss, phase=phase)
        return lj.apply_updates(params, updates), inner, outer

    def _gradient(self, params: Any, tokens: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            logits: Any = self._network.apply({"params": params}, tokens[:, :-1])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return each.mean()

        return jax.value_and_grad(loss_of)(params)

    def _compiled(self, key: Any, step: Callable[..., Any]) -> Any:
        """Compiles a step once."""
        if key not in self._programs:
            mapped: Any = self.workers.map(step, donate=(0, 1, 2))
            self._programs[key] = mapped.lower(*self.state, self.given).compile()
        return self._programs[key]


@functools.cache
def subject(name: str) -> Subject:
    """The subject of a method, which all parts share."""
    return Subject(name)


def started(network: Transformer) -> Any:
    """A network's initial parameters, on the host."""
    variables = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return jax.device_get(variables["params"])
