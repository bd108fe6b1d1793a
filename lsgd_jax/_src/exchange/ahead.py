"""Ahead: a program is compiled in a thread while the steps before its first call run.

jax keeps the result of `lower(...).compile()`, and the ordinary call with such arguments
finds it. Tracing stays in the thread of the caller, whose contexts and settings it reads.
Compilation runs in C++, without Python's lock, and communicates nothing.
"""

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax


PROGRAMS_AHEAD = 256  # due ones, among which those that are missing are compiled


class Ahead:
    """Compiles one program at a time, beside the work of the caller.

    The end of the process waits for a compilation that has begun: XLA cannot cancel it, and
    aborts if Python takes the thread away.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> double = jax.jit(lambda x: 2 * x)
    >>> x = jnp.arange(3.0)
    >>> ahead = lj.aot.Ahead()
    >>> ahead.begin("double", double, [x])  # other work goes on here
    >>> ahead.wait_for("double")
    >>> double(x).tolist()
    [0.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._key: Hashable = None
        self._errors: list[Exception] = []
        self._known = set[Hashable]()  # programs that have begun to be compiled or to run
        self._coming: Iterator[Hashable] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a compilation is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def next_due(self, due: Callable[[], Iterable[Hashable | None]]) -> Any:
        """Returns the key of the program to compile next, for a loop over steps.

        It is the first one that neither `begin` nor `wait_for` was called with.

        Args:
          due: returns the key of the program that is due at each of the next steps, or
            None. Called once; its keys are read as far as they are needed.

        Returns:
          None if a compilation is in progress, or no program is missing.
        """
        if self.is_busy:
            return None
        if self._coming is None:
            keys = (key for key in due() if key is not None)
            self._coming = itertools.islice(keys, PROGRAMS_AHEAD)
        return next((key for key in self._coming if key not in self._known), None)

    def begin(
        self,
        key: Hashable,
        program: Callable[..., Any],
        args: Sequence[Any],
        named: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to compile a program, if it can be compiled before it is called.

        Args:
          key: the name of the program for `wait_for`.
          program: a function that `jax.jit` or the like returned. Any other one is left
            alone.
          args, named: arguments like those of its first call. Their values are not read,
            and their buffers may be gone.
        """
        self._known.add(key)
        lower = getattr(program, "lower", None)
        if lower is None or jax.config.jax_disable_jit:  # type: ignore
            return
        try:
            lowered = lower(*args, **(named or {}))
        except Exception:
            return  # The call itself says what is wrong.
        self._key = key
        self._errors = []
        self._thread = threading.Thread(target=self._compile, args=(lowered,))
        self._thread.start()

    def _compile(self, lowered: Any) -> None:
        try:
            lowered.compile()
        except Exception as error:
            self._errors.append(error)

    def wait_for(self, key: Hashable) -> None:
        """Waits for the compilation of a program that is called next, if it has begun.

        Raises:
          Exception: of the compilation. The next call compiles the program itself.
        """
        self._known.add(key)
        if self._thread is None or self._key != key:
            return
        self._thread.join()
        self._thread = None
        if self._errors:
            raise self._errors.pop()
