"""The table of methods. Their options come from the library's factories.

`--method NAME` selects a row. The parameters of its factories become the options
`--method.PARAMETER`, with the defaults and the help of the factory.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import optax

import lsgd_jax as lj
from train.proposals import meant
from train.task import asynchronous_methods


Factory = Callable[..., optax.GradientTransformation]

# Parameters of transformations that the trainer sets, or leaves at their defaults.
GIVEN = {"axes", "base", "learning_rate", "part"}

# Options with the number of steps before a method's first exchange.
PERIODS = "period", "local_period", "global_period", "local_steps"

# Topologies by their names on the command line.
TOPOLOGIES = {
    name.replace("_", "-"): getattr(lj.topology, name)
    for name in ("ring", "exponential", "bipartite_exponential", "complete", "matchings")
}


class Row(NamedTuple):
    """A method.

    Attributes:
      name: its name on the command line.
      last: the factory of the transformation after the base optimizer, which exchanges
        parameters, or None.
      first: the factory of the transformation before the base optimizer, which aggregates
        gradients, or None.
      around: the factory of a transformation that contains the base optimizer, or None.
      made: functions that build parameters of the factories from options of their own.
      asynchronous: the factory of a method for asynchronous workers, or None. Such a row
        has no other factory.
      delay: the default delay of an exchange between asynchronous workers, or None if the
        method runs in lock step.
    """

    name: str
    last: Factory | None = None
    first: Factory | None = None
    around: Factory | None = None
    made: Mapping[str, Callable[..., Any]] = {}
    asynchronous: Callable[..., lj.asynchronous.Method] | None = None
    delay: int | None = None


def outer_sgd(
    outer_learning_rate: float = 0.7, outer_momentum: float = 0.9
) -> optax.GradientTransformation:
    """DiLoCo's outer optimizer: SGD with Nesterov's momentum.

    Args:
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1).
    """
    return optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)


def anchor_rate(outer_learning_rate: float = 1.0) -> float:
    """The learning rate of SparseLoCo's anchor.

    Args:
      outer_learning_rate: learning rate of the anchor.
    """
    return outer_learning_rate


def edit_guard(
    temperature: float = 1.0,
    threshold: float = 3.0,
    warmup: int = 120,
    decay: float = 0.02,
    clip: float | None = None,
    layerwise: bool = False,
) -> lj.Guard:
    """EDiT's guard of the pseudo-gradients.

    Args:
      temperature: in units of their norms; a norm larger than the smallest one by several
        temperatures has practically no weight.
      threshold: the z-score from which on a norm is anomalous.
      warmup: exchanges before the first test, at least 2.
      decay: weight of the newest norm in the running mean and variance, in [0, 1].
      clip: the largest norm of the merged pseudo-gradient; None: no limit.
      layerwise: whether each leaf is judged, weighed and rolled back by itself.
    """
    return lj.Guard(temperature, threshold, warmup, decay, clip, layerwise)


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
    Row("post-local-sgd", lj.local_sgd, first=allreduce_until),
    Row("slowmo", lj.slowmo),
    Row("diloco", lj.diloco, made={"outer": outer_sgd}),
    Row("sparse-diloco", lj.contrib.sparse_diloco, made={"learning_rate": anchor_rate}),
    Row("edit", lj.diloco, made={"outer": outer_sgd, "guard": edit_guard}),
    Row("grawa", lj.contrib.grawa),
    Row("desloc", around=lj.contrib.desloc),
    Row("noloco", lj.contrib.noloco),
    Row("sparta", lj.contrib.sparta),
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
    Row("krum", first=lj.krum),
    Row("geometric-median", first=lj.geometric_median),
    Row("trimmed-mean", first=lj.trimmed_mean),
    Row("independent"),
    Row("async-lsgd", asynchronous=asynchronous_methods.lsgd),
    Row("async-dpwa", asynchronous=lj.asynchronous.Pairwise),
    Row("async-adpsgd", asynchronous=lj.asynchronous.ADPSGD),
    Row("async-wagma", asynchronous=lj.asynchronous.WAGMA),
    Row("async-diloco", asynchronous=asynchronous_methods.diloco),
    Row("decoupled-diloco", asynchronous=asynchronous_methods.decoupled_diloco),
    Row("overlapped-lsgd", lj.lsgd, delay=8),
    Row("overlapped-diloco", lj.diloco, made={"outer": outer_sgd}, delay=8),
    Row("overlapped-sgp", asynchronous=lj.asynchronous.OSGP),
    Row("overlapped-dpsgd", asynchronous=asynchronous_methods.dpsgd),
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method and its options. Each row has a subclass with the options as fields.

    Attributes:
      name: its name on the command line.
      first: whether it only aggregates gradients before the base optimizer.
      is_asynchronous: whether its workers run asynchronously, on an engine of
        `lsgd_jax.asynchronous`.
      row: its row in the table.
    """

    name: ClassVar[str]
    first: ClassVar[bool]
    is_asynchronous: ClassVar[bool]
    row: ClassVar[Row]

    def around(
        self,
        base: optax.GradientTransformation,
        learning_rate: optax.ScalarOrSchedule = 1.0,
    ) -> optax.GradientTransformationExtraArgs:
        """The chain of a base optimizer and this method, or `base` if it is asynchronous.

        Args:
          base: the base optimizer.
          learning_rate: the learning rate of `base`, a number or an optax schedule, which
            counts steps from 0.
        """
        made = lambda factory: [self._made(factory, learning_rate)] if factory else []
        last = None if self.is_asynchronous else self.row.last
        if self.row.around is not None:
            base = self._made(self.row.around, learning_rate, base=base)
        return optax.chain(*made(self.row.first), base, *made(last))

    def asynchronous(self) -> lj.asynchronous.Method:
        """The method that an engine runs.

        Raises:
          ValueError: options are impossible, or do not apply to asynchronous workers.
        """
        if self.row.asynchronous is not None:
            return self._made(self.row.asynchronous, 1.0)
        made = self.exchanges(1.0)
        assert made is not None
        return lj.asynchronous.Pulls(made, window=getattr(self, "loss_window", 10))

    def exchanges(self, learning_rate: optax.ScalarOrSchedule) -> lj.Exchange | None:
        """The transformation chained after the base optimizer, or None."""
        if self.row.last is None:
            return None
        made = self._made(self.row.last, learning_rate)
        assert isinstance(made, lj.Exchange)
        return made

    def first_exchange(self) -> int | None:
        """The step whose exchange first changes the workers, or None if none ever does.

        Asynchronous workers of different speeds may be a few steps away from it.
        """
        if self.row.first is not None:
            return 1
        found = self.asynchronous() if self.is_asynchronous else self.exchanges(1.0)
        pulls = getattr(getattr(found, "exchange", found), "pulls", ())
        if pulls:
            return min((pull.agrees_at or pull.every) + pull.delay for pull in pulls)
        options = vars(self)
        periods = [options[name] for name in PERIODS if name in options]
        if periods:
            return min(periods) // options.get("fragments", 1)
        return None if found is None else 1

    def __reduce__(self) -> Any:
        return functools.partial(make, self.name, **vars(self)), ()

    def _made(
        self,
        factory: Callable[..., Any],
        learning_rate: optax.ScalarOrSchedule,
        **given: Any,
    ) -> Any:
        for name in inspect.signature(factory).parameters:
            if name in self.row.made:
                make = self.row.made[name]
                parts = inspect.signature(make).parameters
                given[name] = make(**{part: getattr(self, part) for part in parts})
            elif name == "topology":
                given[name] = TOPOLOGIES[getattr(self, name)]
            elif name in vars(self):
                given[name] = getattr(self, name)
            elif name == "learning_rate":
                given[name] = _of_library_steps(learning_rate)
        return factory(**given)


def _of_library_steps(rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """A schedule for the library, which counts steps from 1; optax counts from 0."""
    return (lambda t: rate(t - 1)) if callable(rate) else rate


def _options(function: Callable[..., Any], row: Row) -> type:
    """A dataclass of the parameters of a function in a row.

    Its docstring is that of the function, in which tyro finds the help of the options.
    """
    hints, fields = typing.get_type_hints(function), []
    given = row.made.keys() | (set() if function is row.asynchronous else GIVEN)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = None if name in given else _kind(name, hints[name])
        if kind is None:
            continue
        default = parameter.default
        if name == "topology":
            (default,) = [key for key, graph in TOPOLOGIES.items() if graph is default]
        if name == "delay" and row.delay is not None:
            default = row.delay
        fields.append((name, kind, dataclasses.field(default=default)))
    described = {"__doc__": inspect.getdoc(function), "__module__": __name__}
    return dataclasses.make_dataclass(
        function.__name__, fields, namespace=described, frozen=True
    )


def _kind(name: str, hint: Any) -> Any:
    """The type of an option, or None if the parameter accepts only objects."""
    if name == "topology":
        return typing.cast(Any, Literal)[tuple(TOPOLOGIES)]
    parts = typing.get_args(hint)
    for part in (hint, *parts):
        if typing.get_origin(part) is Literal:
            return part
    for scalar in (bool, float, int, str):
        if scalar in (hint, *parts):
            return scalar | None if types.NoneType in parts else scalar
    return None


def _class(row: Row) -> type[Method]:
    # --help lists the options in reverse order.
    functions = (*row.made.values(), row.asynchronous, row.last, row.around, row.first)
    options = [_options(x, row) for x in functions if x is not None]
    return dataclasses.make_dataclass(
        row.name.title().replace("-", ""),
        (),
        bases=(*options, Method),
        namespace={
            "__module__": __name__,
            "name": row.name,
            "first": row.last is None and row.first is not None,
            "is_asynchronous": row.asynchronous is not None or row.delay is not None,
            "row": row,
        },
        frozen=True,
    )


METHODS: Mapping[str, type[Method]] = {row.name: _class(row) for row in ROWS}


def find(name: str) -> type[Method]:
    """The class of a method.

    Raises:
      ValueError: no method has this name.
    """
    if name not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(METHODS)}, got method={name!r}"
            f"{meant(name, METHODS)}"
        )
    return METHODS[name]


def make(name: str, *values: Any, **options: Any) -> Method:
    """A method with the given options; raises ValueError like `find`.

    >>> make("easgd", period=4).period
    4
    """
    return find(name)(*values, **options)
