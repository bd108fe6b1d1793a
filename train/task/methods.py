"""The one list of methods: a row each; their options come from the library's factories.

`--method NAME` chooses a row, and the parameters of its factories become the options
`--method.PARAMETER`, with the defaults and the help of the factory itself.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import optax
import tyro

import lsgd_jax as lj
from train.task import asynchronous_methods, hybrids, options


Factory = Callable[..., optax.GradientTransformation]

# What the trainer gives a factory, or leaves to it, so that it is no option.
GIVEN = {"axes", "learning_rate", "part"}


class Row(NamedTuple):
    """A method.

    Attributes:
      name: on the command line.
      last: the factory of what stands behind the base optimizer and exchanges parameters,
        or None.
      first: the factory of what stands before it and aggregates gradients, or None.
      made: parameters of the factories that are made of options by a function of its own.
      summary: what the method is; by default its factory's first line.
      asynchronous: the factory of a method for workers that step at their own pace, or
        None; such a row has no other one.
    """

    name: str
    last: Factory | None = None
    first: Factory | None = None
    made: Mapping[str, Callable[..., Any]] = {}
    summary: str = ""
    asynchronous: Callable[..., lj.asynchronous.Method] | None = None


def outer_sgd(
    outer_learning_rate: float = 0.7, outer_momentum: float = 0.9
) -> optax.GradientTransformation:
    """DiLoCo's outer optimizer: SGD with Nesterov's momentum.

    Args:
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1).
    """
    return optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)


def allreduce_until(switch_step: int = 1000) -> optax.GradientTransformation:
    """The first part of post-local SGD.

    Args:
      switch_step: the last step on which the workers take the mean gradient.
    """
    return lj.allreduce(until=switch_step)


ROWS = (
    Row("lsgd", lj.lsgd),
    Row("easgd", lj.easgd),
    Row("downpour", lj.downpour),
    Row("local-sgd", lj.local_sgd),
    Row(
        "post-local-sgd",
        lj.local_sgd,
        first=allreduce_until,
        summary="Post-local SGD: all-reduce SGD until a step, then local SGD.",
    ),
    Row("slowmo", lj.slowmo),
    Row("diloco", lj.diloco, made={"outer": outer_sgd}),
    Row("diloco-leader", hybrids.diloco_leader, made={"outer": outer_sgd}),
    Row("lsgd-diloco", hybrids.lsgd_diloco, made={"outer": outer_sgd}),
    Row("parle", lj.parle),
    Row("dpsgd", lj.dpsgd),
    Row("sgp", lj.sgp),
    Row("osgp", lj.osgp),
    Row("adpsgd", lj.adpsgd),
    Row("pairwise", lj.pairwise),
    Row("gosgd", lj.gosgd),
    Row("wagma", lj.wagma),
    Row("allreduce", first=lj.allreduce),
    Row("coordinate-median", first=lj.coordinate_median),
    Row("licm", first=lj.licm),
    Row("cge", first=lj.cge),
    Row("independent", summary="Independent workers: nothing is exchanged."),
    Row("async-lsgd", asynchronous=asynchronous_methods.lsgd),
    Row("async-dpwa", asynchronous=lj.asynchronous.Pairwise),
    Row("async-adpsgd", asynchronous=lj.asynchronous.ADPSGD),
    Row("async-wagma", asynchronous=lj.asynchronous.WAGMA),
    Row("async-diloco", asynchronous=asynchronous_methods.diloco),
    Row("overlapped-lsgd", asynchronous=asynchronous_methods.overlapped_lsgd),
    Row("overlapped-diloco", asynchronous=asynchronous_methods.overlapped_diloco),
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method and its options; of each row there is a class with the options as fields.

    Attributes:
      name: on the command line.
      first: whether it aggregates gradients and does nothing behind the base optimizer.
      is_asynchronous: whether its workers step at their own pace, on an engine of
        `lsgd_jax.asynchronous`.
      row: where it stands in the list.
    """

    name: ClassVar[str]
    first: ClassVar[bool]
    is_asynchronous: ClassVar[bool]
    row: ClassVar[Row]

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                name = f"method.{name}"
                raise ValueError(f"`{name}` must be finite, got {name}={value}")

    def around(
        self,
        base: optax.GradientTransformation,
        learning_rate: optax.ScalarOrSchedule = 1.0,
    ) -> optax.GradientTransformationExtraArgs:
        """The chain of a base optimizer and this method, without it if it is asynchronous.

        Args:
          base: the base optimizer.
          learning_rate: that of `base`: a number or a schedule that counts from 0, as
            optax's do.
        """
        first, last = (
            [] if factory is None else [self._made(factory, learning_rate)]
            for factory in (self.row.first, self.row.last)
        )
        return optax.chain(*first, base, *last)

    def last(self, learning_rate: optax.ScalarOrSchedule = 1.0) -> Any:
        """What stands behind the base optimizer; None if nothing does."""
        factory = self.row.last
        return None if factory is None else self._made(factory, learning_rate)

    def asynchronous(self) -> lj.asynchronous.Method:
        """What an engine runs, of a method that is asynchronous.

        Raises:
          ValueError: options that are not possible, or not for workers at their own pace.
        """
        assert self.row.asynchronous is not None
        return self.row.asynchronous(**vars(self))

    def exchanges(self, learning_rate: optax.ScalarOrSchedule) -> lj.Exchange | None:
        """What stands behind the base optimizer, if there is anything."""
        if self.row.last is None:
            return None
        made = self._made(self.row.last, learning_rate)
        assert isinstance(made, lj.Exchange)
        return made

    def __reduce__(self) -> Any:
        return functools.partial(make, self.name, **vars(self)), ()

    def _made(
        self, factory: Factory, learning_rate: optax.ScalarOrSchedule
    ) -> optax.GradientTransformation:
        given: dict[str, Any] = {}
        for name in inspect.signature(factory).parameters:
            if name in self.row.made:
                make = self.row.made[name]
                parts = inspect.signature(make).parameters
                given[name] = make(**{part: getattr(self, part) for part in parts})
            elif name == "topology":
                given[name] = options.TOPOLOGIES[getattr(self, name)]
            elif name == "learning_rate":
                given[name] = _of_library_steps(learning_rate)
            elif name not in GIVEN:
                given[name] = getattr(self, name)
        return factory(**given)


def _of_library_steps(rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """A rate as the library asks for it: its first step is t = 1, that of optax 0."""
    return (lambda t: rate(t - 1)) if callable(rate) else rate


def _options(row: Row) -> list[options.Option]:
    given = (row.first, row.last, row.asynchronous)
    factories = [factory for factory in given if factory is not None]
    found = []
    for factory in factories:
        found += options.read(factory, GIVEN | row.made.keys())
    for make in row.made.values():
        found += options.read(make)
    return found


def _class(row: Row) -> type[Method]:
    factory = row.last or row.first or row.asynchronous
    summary = row.summary or (options.summary(factory) if factory else "")
    as_field = lambda option: (
        option.name,
        Annotated[option.type, tyro.conf.arg(help=option.help)],
        dataclasses.field(default=option.default),
    )
    return dataclasses.make_dataclass(
        row.name.title().replace("-", ""),
        map(as_field, _options(row)),
        bases=(Method,),
        namespace={
            "__doc__": summary,
            "__module__": __name__,
            "name": row.name,
            "first": row.last is None and row.first is not None,
            "is_asynchronous": row.asynchronous is not None,
            "row": row,
        },
        frozen=True,
    )


METHODS: Mapping[str, type[Method]] = {row.name: _class(row) for row in ROWS}
_REMOVED = {
    "budget-lsgd": "; async-lsgd, in its blocking form on Ray, is the same rule",
}


def find(name: str) -> type[Method]:
    """The class of a method.

    Raises:
      ValueError: there is no method of that name.
    """
    if name not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(METHODS)}, got method={name!r}"
            f"{_REMOVED.get(name, '')}"
        )
    return METHODS[name]


def make(name: str, *values: Any, **options: Any) -> Method:
    """A method with some of its options.

    Raises:
      ValueError: there is no method of that name.

    >>> make("easgd", period=4).period
    4
    """
    return find(name)(*values, **options)
