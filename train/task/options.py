"""Options of the command line, read from the signature and the docstring of a function."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal, NamedTuple

import lsgd_jax as lj


# Graphs by their names on the command line.
TOPOLOGIES = {
    name.replace("_", "-"): getattr(lj.topology, name)
    for name in ("ring", "exponential", "bipartite_exponential", "complete")
}
# What an option may hold. A schedule is a number on the command line.
SCALARS = (bool, int, float, str)


class Option(NamedTuple):
    """A parameter of a function, as the command line knows it.

    Attributes:
      name: the parameter's.
      type: int, float, bool, str, a Literal, or one of these or None.
      default: the parameter's, a topology by its name.
      help: what `Args:` says of it.
    """

    name: str
    type: Any
    default: Any
    help: str


def read(function: Callable[..., Any], without: Container[str] = ()) -> list[Option]:
    """The options of a function, but for some parameters.

    Raises:
      TypeError: a parameter without a default or an entry in `Args:`, or of a type that
        the command line cannot express.

    >>> [(o.name, o.type, o.default) for o in read(lj.licm, {"axes"})]
    [('gamma', <class 'float'>, 0.5)]
    """
    hints, texts = typing.get_type_hints(function), arguments(inspect.getdoc(function))
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in without:
            continue
        default = parameter.default
        if default is parameter.empty or name not in texts:
            raise TypeError(f"{function} must have a default and help for {name!r}")
        kind: Any = _kind(name, hints[name])
        if name == "topology":
            kind = typing.cast(Any, Literal)[tuple(TOPOLOGIES)]
            (default,) = [key for key, graph in TOPOLOGIES.items() if graph is default]
        found.append(Option(name, kind, default, texts[name]))
    return found


def _kind(name: str, hint: Any) -> Any:
    """The type of an option out of that of its parameter."""
    if name == "topology" or hint in SCALARS or typing.get_origin(hint) is Literal:
        return hint
    parts = typing.get_args(hint)
    for part in parts:  # names, in place of which Python takes an object as well
        if typing.get_origin(part) is Literal:
            return part
    for scalar in (float, int, str):
        if scalar in parts:
            return scalar | None if types.NoneType in parts else scalar
    raise TypeError(f"{name!r} is of a type that has no option: {hint}")


def summary(function: Callable[..., Any]) -> str:
    """The first line of a docstring.

    >>> summary(lj.allreduce)[:15]
    'All-reduce SGD:'
    """
    return (inspect.getdoc(function) or "").partition("\n")[0]


def arguments(docstring: str | None) -> dict[str, str]:
    r"""What the `Args:` of a docstring say of each parameter, as one paragraph each.

    Of schedules and functions, which a command line cannot hold, nothing is said.

    >>> arguments("Pulls.\n\nArgs:\n  pull: λ in [0, 1], or a schedule of t;\n    small.\n")
    {'pull': 'λ in [0, 1]; small.'}
    """
    _, _, section = (docstring or "").partition("\nArgs:\n")
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for line in _indented(section.splitlines()):
        entry = re.fullmatch(r"  (\w+): (.*)", line)
        if entry:
            words = found.setdefault(entry[1], [])
            line = entry[2]
        words.append(line.strip())
    return {name: _plain(" ".join(words)) for name, words in found.items()}


def _indented(lines: Iterable[str]) -> Iterable[str]:
    """The lines up to the next section of a docstring."""
    for line in lines:
        if line and not line.startswith("  "):
            return
        if line:
            yield line


def _plain(text: str) -> str:
    others = "schedule of t|function of W that builds it|`Wire`"
    text = re.sub(rf",? or a ({others})", "", text)
    text = re.sub(r":math:`([^`]*)`", r"\1", text).replace("``", "`")
    return text
