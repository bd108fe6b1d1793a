"""Old public names, which work for one more minor version, with a warning."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lsgd_jax._src.words import name_meant


Function = TypeVar("Function", bound=Callable[..., Any])


def renamed_argument(**names: str) -> Callable[[Function], Function]:
    """Returns a decorator for a function whose arguments have new names.

    Args:
      **names: by the old name, the new one.
    """

    def decorator(function: Function) -> Function:
        @functools.wraps(function)
        def takes_both(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                message = f"`{old}` is `{names[old]}` now; 0.6 drops the old name"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return takes_both  # type: ignore[return-value]

    return decorator


def renamed(module: str, **names: Any) -> Callable[[str], Any]:
    """The `__getattr__` of a module in which classes have new names.

    Args:
      module: the module.
      **names: by the old name, the class.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = names[name]
        message = f"{module}.{name} is {found.__name__} now; 0.6 drops the old name"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return found

    return find


def moved(old: str, **names: Mapping[str, Any]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names have moved to modules inside it.

    Args:
      old: the module.
      **names: by the module that has them now, the names and their values.
    """

    def find(name: str) -> Any:
        for new, inside in names.items():
            if name in inside and not name.startswith("_"):
                message = f"{old}.{name} is {old}.{new}.{name} now; 0.5 drops the old name"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return inside[name]
        meant = name_meant(name, vars(sys.modules[old]))
        advice = f"; did you mean {old}.{meant}?" if meant else ""
        raise AttributeError(f"module {old!r} has no attribute {name!r}{advice}")

    return find
