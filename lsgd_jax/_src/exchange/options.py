"""Options: what every method that pulls takes, described once and applied by `exchange`."""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar

from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.exchange.kernel import Check, Late, Pull
from lsgd_jax._src.exchange.memory import Memory
from lsgd_jax._src.exchange.parts import Fragment, Part, ScanAxis
from lsgd_jax._src.wire.top_k import TopK
from lsgd_jax._src.wire.wire import Wire, WireFormat


class PullOptions(TypedDict, total=False):
    """Options of all methods that pull, and of `exchange`, which applies them.

    A method of your own takes them as ``**options: Unpack[PullOptions]`` and passes them to
    `exchange`.

    Attributes:
      wire: the format in which parameters travel, or a `Wire` or `TopK`.
      fragments: number of fragments that take turns, F; must divide the period. Fragment i
        is pulled at steps t ≡ (i + 1) τ / F (mod τ), with a state of its own.
      delay: steps between the agreement and the pull, less than τ. The message travels
        meanwhile; a copy of the parameters is kept. With a delay of τ / F or more the
        messages of several fragments are in flight.
      late: what a late target does to the steps since its agreement: 'replace' drops them
        or, with λ < 1, a share λ of them; 'add' keeps them. See `Pull`.
      after: the number of steps before the first period begins; until then the workers
        train alone.
      part: the leaves to exchange, as for `Pull`. Defaults to all.
      scan_axis: the axis along which layers are stacked, of all leaves or by path.
        Fragments cut leaves there, see `fragment`. By default leaves are not cut.
      memory: 'device' or 'host', where state that only exchanges read is kept between them.
      verify: whether exchanges compare what must be bit-identical on all workers, and
        repair a worker that differs; see `Pull`.
      check: when finiteness is checked: 'due', only at exchanges, or 'every_step'.
    """

    wire: Wire | TopK | WireFormat
    fragments: int
    delay: int
    late: Late
    after: int
    part: Part | None
    scan_axis: ScanAxis | None
    memory: Memory
    verify: bool
    check: Check


DEFAULTS: Mapping[str, Any] = {
    "wire": "float32",
    "fragments": 1,
    "delay": 0,
    "late": "replace",
    "after": 0,
    "part": None,
    "scan_axis": None,
    "memory": "device",
    "verify": False,
    "check": "due",
}

P = ParamSpec("P")
T = TypeVar("T")


def takes_options(**refused: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator for a factory of methods that takes the options of every pull.

    The factory takes them as ``**options: Unpack[PullOptions]`` and passes them on to
    `exchange`. The decorator puts each option, with its default and its description, into
    the factory's signature and docstring, where ``help`` and the trainer's command line
    find it. In the docstring the options replace the entry of ``**options``.

    Args:
      **refused: the options that the factory does not take, each with the reason.

    Returns:
      The decorator. The decorated factory raises a ValueError with the reason for an option
      that is refused, and a TypeError for an option that does not exist.

    Raises:
      TypeError: a refused option does not exist, or the factory has no ``**options``.

    >>> import inspect
    >>> from typing import Unpack
    >>> import lsgd_jax as lj
    >>> @lj.rules.takes_options(wire="a robust mean travels in float32")
    ... def trimmed(
    ...     period: int = 8, **options: Unpack[lj.rules.PullOptions]
    ... ) -> lj.Exchange:
    ...     pull = lj.Pull(lj.rules.robust_mean("trimmed_mean"), 1.0, every=period)
    ...     return lj.exchange(pull, **options)
    >>> list(inspect.signature(trimmed).parameters)[:4]
    ['period', 'fragments', 'delay', 'late']
    >>> [t for t in range(1, 33) if trimmed(16, fragments=2).is_due(t)]
    [8, 16, 24, 32]
    >>> trimmed(wire="int8")
    Traceback (most recent call last):
    ValueError: `trimmed` takes no `wire`: a robust mean travels in float32
    """
    unknown = [name for name in refused if name not in DEFAULTS]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; see `PullOptions`")

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        taken = [name for name in DEFAULTS if name not in refused]
        signature = _signature(method, taken)

        @functools.wraps(method)
        def checked(*args: P.args, **named: P.kwargs) -> T:
            for name in named:
                if name in refused:
                    raise ValueError(
                        f"`{method.__name__}` takes no `{name}`: {refused[name]}"
                    )
            try:
                signature.bind(*args, **named)
            except TypeError as error:
                # The method itself takes any option, and knows only the name `options`.
                raise TypeError(f"{method.__name__}() {error}") from None
            return method(*args, **named)

        made: Any = checked
        made.__signature__ = signature
        hints = {p.name: p.annotation for p in signature.parameters.values()}
        hints["return"] = signature.return_annotation
        # Tools that read hints, such as tyro, see the options one by one.
        missing = inspect.Signature.empty
        made.__annotations__ = {name: x for name, x in hints.items() if x is not missing}
        made.__doc__ = _documented(method.__doc__ or "", taken)
        return checked

    return decorate


def with_options(pulls: Sequence[Pull], options: PullOptions) -> list[Pull]:
    """Returns the pulls with these options; each keeps its own of those that are missing.

    Raises:
      TypeError: an option that there is not.
      ValueError: fragments of fragments, and what `Pull` and `fragment` refuse.
    """
    given: dict[str, Any] = dict(options)
    unknown = [name for name in given if name not in DEFAULTS]
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; see `PullOptions`")
    check_option("check", given.pop("check", "due"), typing.get_args(Check))
    count = given.pop("fragments", 1)
    scan_axis = given.pop("scan_axis", None)
    check_positive_int("fragments", count)
    if count > 1:
        given |= {"fragments": count, "scan_axis": scan_axis}
    return [_changed(pull, given) for pull in pulls]


def _changed(pull: Pull, options: Mapping[str, Any]) -> Pull:
    """The pull with options."""
    if "fragments" in options and pull.fragments > 1:
        raise ValueError(
            f"`fragments` must be given once, got fragments={options['fragments']} for "
            f"pulls that are in {pull.fragments} fragments"
        )
    if isinstance(pull.part, Fragment) and "part" in options:
        options = {**options, "part": pull.part._replace(part=options["part"])}
    return dataclasses.replace(pull, **options)


def _signature(method: Callable, taken: Sequence[str]) -> inspect.Signature:
    """The method's signature with the options in place of ``**options``."""
    hints = typing.get_type_hints(PullOptions)
    signature = inspect.signature(method)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        raise TypeError(f"{method.__name__}() must take **options, as `takes_options` says")
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS[name],
            annotation=hints[name],
        )
        for name in taken
    ]
    return signature.replace(parameters=[*own, *options])


def _documented(doc: str, taken: Sequence[str]) -> str:
    """The docstring with the options' descriptions in place of that of ``**options``."""
    described = inspect.getdoc(PullOptions) or ""
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", described, re.MULTILINE)

    def entry(match: re.Match[str]) -> str:
        indent = match[1]
        lines = [f"{name}: {text}" for name, text in entries if name in taken]
        return "\n".join(lines).replace("\n    ", "\n  ").replace("\n", f"\n{indent}")

    own = re.compile(r"^( *)\*\*options: .*(?:\n\1 +.*)*", re.MULTILINE)
    return own.sub(lambda match: match[1] + entry(match), doc)
