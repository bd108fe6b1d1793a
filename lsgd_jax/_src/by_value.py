"""Factories whose results compare, hash and pickle as the calls that made them.

The result of a factory holds closures, which cannot be compared or pickled. Equal calls of
one factory make equal results, so a result is identified by its call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from lsgd_jax._src.words import telling_words


class ByValue:
    """An object that equals the results of equal calls, or only itself without a call."""

    made_by: tuple[Callable, tuple, dict[str, Any]] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other or self.made_by is None or not isinstance(other, ByValue):
            return self is other
        return are_equal(self.made_by, other.made_by)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # Some arguments, such as a list of paths, have no hash.
        return object.__hash__(self) if self.made_by is None else hash(self.made_by[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.made_by is None:
            return super().__reduce_ex__(protocol)
        factory, args, named = self.made_by
        return functools.partial(factory, **named), args


def are_equal(a: Any, b: Any) -> bool:
    """Whether two calls, or parts of them, are equal; arrays are by dtype and elements."""
    if type(a) is not type(b):
        return isinstance(a, int | float) and isinstance(b, int | float) and a == b
    if isinstance(a, ByValue):
        return a == b
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray | jax.Array):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


P = ParamSpec("P")
T = TypeVar("T", bound=ByValue)


def by_value(factory: Callable[P, T]) -> Callable[P, T]:
    """Returns the factory so that it records each call on the `ByValue` it returns."""
    signature = inspect.signature(factory)
    make = telling_words(factory)

    @functools.wraps(factory)
    def noting(*args: P.args, **named: P.kwargs) -> T:
        made = make(*args, **named)
        call = signature.bind(*args, **named)
        call.apply_defaults()
        vars(made)["made_by"] = noting, call.args, call.kwargs
        return made

    return noting
