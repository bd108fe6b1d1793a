"""The table of methods. Their options come from the library's factories.

`--method NAME` selects a row, and `--method MODULE:FUNCTION` makes one from a factory of
the user. The parameters of its factories become the options `--method.PARAMETER`, with the
defaults and the help of the factory.
"""

import dataclasses
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import optax

import lsgd_jax as lj
from train.config import parts, periods
from train.process.messages import meant, one_line


Factory = Callable[..., Any]

# Parameters of transformations that the trainer sets, or leaves at their defaults.
GIVEN = {"axes", "base", "learning_rate"}

# Kinds of parameters that are no options: *args and **options.
PACKED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# Defaults that differ from those of the library.
DEFAULTS = {"verify": True}

# The type of the parameter that says which leaves a method exchanges.
PART = typing.get_type_hints(lj.rules.PullOptions)["part"]

# Options with the number of steps before a method's first exchange.
PERIODS = "period", "local_period", "global_period"

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
      asynchronous: the factory of a method of asynchronous workers, or of an exchange that
        they run. Such a row has no other factory.
      made: functions that build parameters of the factories from options of their own.
      renamed: parameters whose options have other names.
      defaults: values of parameters that differ from the factories' defaults.
    """

    name: str
    last: Factory | None = None
    first: Factory | None = None
    around: Factory | None = None
    asynchronous: Factory | None = None
    made: Mapping[str, Factory] = {}
    renamed: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}

    @property
    def functions(self) -> list[Factory]:
        """The functions whose parameters are the options. --help lists them in reverse."""
        own = self.asynchronous, self.last, self.around, self.first
        return [*self.made.values(), *filter(None, own)]


def outer_sgd(
    outer_learning_rate: float = 0.7, outer_momentum: float = 0.9
) -> optax.GradientTransformation:
    """The outer optimizer of DiLoCo and PALSGD: SGD with Nesterov's momentum.

    Args:
      outer_learning_rate: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer, in [0, 1).
    """
    return optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)


def losses_that_elect(loss_window: int = 10, held_out: int = 0) -> int:
    """The number of losses that elect a leader.

    Args:
      loss_window: number of losses by which a worker is judged, the last ones (the paper:
        10 on CIFAR-10, 64 on ImageNet).
      held_out: number of training examples (windows of a text) that no worker trains on. If
        it is not 0, the loss on them, at the steps of an exchange, elects the leader in
        place of the last training losses.

    Raises:
      ValueError: a negative number of examples.
    """
    if held_out < 0:
        raise ValueError(f"`held_out` must be at least 0, got {held_out=}")
    return 1 if held_out else loss_window


def async_lsgd(
    local_pull: float = 0.1,
    global_pull: float = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    blocking: bool = True,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.Method:
    """Asynchronous LSGD: pulls whenever the workers together have taken enough steps.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0 switches the level off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0 switches it off.
      local_period: steps per worker, on average, between pulls towards the node's leader.
      global_period: steps per worker, on average, between pulls towards the leader of all.
      loss_window: number of recent losses whose mean elects the leader.
      blocking: all workers meet for a pull, as in the original; otherwise no worker waits,
        and each is pulled towards the parameters that the leader has at the request.
      wire: the format in which parameters travel.
    """
    options = local_pull, global_pull, local_period, global_period, loss_window
    if not blocking:
        return lj.asynchronous.LSGD(*options, wire=wire)
    return lj.asynchronous.Pulls(lj.lsgd(*options, wire=wire), True, loss_window)


def is_embedding(path: str) -> bool:
    """Whether a parameter is an embedding, which the radial merge leaves out."""
    return path.rpartition("/")[2] == "embedding"


# The options of an outer optimizer that is built into a method.
OUTER = {"learning_rate": "outer_learning_rate", "momentum": "outer_momentum"}

ROWS = (
    Row("lsgd", lj.lsgd, made={"loss_window": losses_that_elect}),
    Row("easgd", lj.easgd),
    Row("downpour", lj.downpour),
    Row("local-sgd", lj.local_sgd),
    Row(
        "post-local-sgd",
        lj.local_sgd,
        first=lj.allreduce,
        renamed={"until": "switch_step"},
        defaults={"until": 1000},
    ),
    Row("slowmo", lj.slowmo),
    Row("diloco", lj.diloco, made={"outer": outer_sgd}),
    Row("sparse-diloco", lj.contrib.sparse_diloco, renamed=OUTER),
    Row("edit", lj.diloco, made={"outer": outer_sgd, "guard": lj.Guard}),
    Row("grawa", lj.contrib.grawa),
    Row("desloc", around=lj.contrib.desloc),
    Row(
        "palsgd",
        lj.contrib.palsgd,
        made={"outer": outer_sgd},
        defaults={"outer_learning_rate": 0.25},
    ),
    Row("noloco", lj.contrib.noloco),
    Row("sparta", lj.contrib.sparta),
    Row("parle", lj.parle),
    Row("dpsgd", lj.dpsgd),
    Row("sgp", lj.sgp),
    Row("osgp", lj.osgp),
    Row("adpsgd", lj.adpsgd),
    Row("pairwise", lj.pairwise),
    Row("gosgd", lj.contrib.gosgd),
    Row("wagma", lj.wagma),
    Row("allreduce", first=lj.allreduce),
    Row("coordinate-median", first=lj.robust.coordinate_median),
    Row("licm", first=lj.robust.licm),
    Row("cge", first=lj.robust.cge),
    Row("krum", first=lj.robust.krum),
    Row("geometric-median", first=lj.robust.geometric_median),
    Row("trimmed-mean", first=lj.robust.trimmed_mean),
    Row("independent"),
    Row("async-lsgd", asynchronous=async_lsgd),
    Row("async-dpwa", asynchronous=lj.asynchronous.Pairwise),
    Row("async-adpsgd", asynchronous=lj.asynchronous.ADPSGD),
    Row("async-wagma", asynchronous=lj.asynchronous.WAGMA),
    Row("async-diloco", asynchronous=lj.asynchronous.DiLoCo, renamed=OUTER),
    Row(
        "decoupled-diloco",
        asynchronous=lj.asynchronous.DecoupledDiLoCo,
        renamed=OUTER,
        defaults={"averaged": is_embedding},
    ),
    Row("overlapped-lsgd", asynchronous=lj.lsgd, defaults={"delay": 8}),
    Row(
        "overlapped-diloco",
        asynchronous=lj.diloco,
        made={"outer": outer_sgd},
        defaults={"delay": 8},
    ),
    Row("overlapped-sgp", asynchronous=lj.asynchronous.OSGP),
    Row(
        "overlapped-dpsgd",
        asynchronous=lj.asynchronous.OSGP,
        defaults={"topology": lj.topology.ring},
    ),
)


@dataclasses.dataclass(frozen=True)
class MethodConfig:
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

    @property
    def num_held_out(self) -> int:
        """The number of training examples whose loss elects leaders; mostly 0."""
        return getattr(self, "held_out", 0)

    def around(
        self,
        base: optax.GradientTransformation,
        learning_rate: optax.ScalarOrSchedule = 1.0,
        steps: int | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """The chain of a base optimizer and this method, or `base` if it is asynchronous.

        Args:
          base: the base optimizer.
          learning_rate: the learning rate of `base`, a number or an optax schedule, which
            counts steps from 0.
          steps: of the run, for a period that depends on the rate.
        """
        before = self.before_exchange(base, learning_rate, steps)
        exchange = self.exchanges(learning_rate, steps)
        return optax.chain(*before) if exchange is None else optax.chain(*before, exchange)

    def before_exchange(
        self,
        base: optax.GradientTransformation,
        learning_rate: optax.ScalarOrSchedule = 1.0,
        steps: int | None = None,
    ) -> list[optax.GradientTransformation]:
        """The chain without `exchanges`, its last part. For arguments see `around`."""
        made = functools.partial(self._made, learning_rate=learning_rate, steps=steps)
        if self.row.around is not None:
            base = made(self.row.around, base=base)
        first = [made(self.row.first)] if self.row.first else []
        return [*first, base]

    def asynchronous(
        self,
        learning_rate: optax.ScalarOrSchedule = 1.0,
        steps: int | None = None,
    ) -> lj.asynchronous.Method:
        """The method that an engine runs. For arguments see `around`.

        Raises:
          ValueError: options are impossible, or do not apply to asynchronous workers.
        """
        assert self.row.asynchronous is not None
        made = self._made(self.row.asynchronous, learning_rate, steps)
        if not isinstance(made, lj.Exchange):
            return made
        return lj.asynchronous.Pulls(made, window=getattr(self, "loss_window", 10))

    def exchanges(
        self, learning_rate: optax.ScalarOrSchedule, steps: int | None = None
    ) -> lj.Exchange | None:
        """The transformation chained after the base optimizer, or None."""
        if self.row.last is None:
            return None
        return self._made(self.row.last, learning_rate, steps)

    def first_exchange(self) -> int | None:
        """The step whose exchange first changes the workers, or None if none ever does.

        Asynchronous workers of different speeds may be a few steps away from it.
        """
        if self.row.first is not None:
            return 1
        found = self.asynchronous() if self.is_asynchronous else self.exchanges(1.0)
        pulls = getattr(getattr(found, "exchange", found), "pulls", ())
        if pulls:
            return min(pull.schedule.first_landing() for pull in pulls)
        options = vars(self)
        steps = [options[name] for name in (*PERIODS, "local_steps") if name in options]
        if steps:
            return min(steps) // options.get("fragments", 1)
        return None if found is None else 1

    def __reduce__(self) -> Any:
        return functools.partial(make, self.name, **vars(self)), ()

    def _made(
        self,
        factory: Factory,
        learning_rate: optax.ScalarOrSchedule,
        steps: int | None = None,
        **given: Any,
    ) -> Any:
        row = self.row
        options = vars(self)
        hints = typing.get_type_hints(factory)
        for name, parameter in inspect.signature(factory).parameters.items():
            option = row.renamed.get(name, name)
            if name in row.made and factory is not row.made[name]:
                given[name] = self._made(row.made[name], learning_rate, steps)
            elif _graph(row.defaults.get(name, parameter.default)):
                given[name] = TOPOLOGIES[options[option]]
            elif option in options and name in (*PERIODS, "sync_period"):
                given[name] = periods.parse(options[option], learning_rate, steps)
            elif option in options and hints.get(name) == PART:
                text = options[option]
                given[name] = None if text is None else parts.parse(text)
            elif option in options:
                given[name] = options[option]
            elif name in row.defaults:
                given[name] = row.defaults[name]
            elif name == "learning_rate":
                given[name] = _of_library_steps(learning_rate)
        return factory(**given)


def _of_library_steps(rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """A schedule for the library, which counts steps from 1; optax counts from 0."""
    return (lambda t: rate(t - 1)) if callable(rate) else rate


def _options(function: Factory, row: Row) -> type:
    """A dataclass of the parameters of a function in a row.

    Its docstring is that of the function, in which tyro finds the help of the options.
    """
    hints = typing.get_type_hints(function)
    doc = inspect.getdoc(function)
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        option = row.renamed.get(name, name)
        is_made = name in row.made and function is not row.made[name]
        given = is_made or option in GIVEN or parameter.kind in PACKED
        given |= name == "verify" and row.asynchronous is not None
        default = {**DEFAULTS, **row.defaults}.get(name, parameter.default)
        kind = None if given else _kind(hints.get(name, type(default)), default)
        if kind is None:
            continue
        default = _graph(default) or default
        fields.append((option, kind, dataclasses.field(default=default)))
        doc = re.sub(f"^  {name}:", f"  {option}:", doc or "", flags=re.MULTILINE)
    doc = (doc or "").replace("`Periods`", f"one that changes: {periods.CHANGING}")
    entry = re.compile(r"^  part: .*(?:\n    .*)*", re.MULTILINE)
    doc = entry.sub(f"  part: {parts.DESCRIPTION}", doc)
    described = {"__doc__": doc, "__module__": __name__}
    return dataclasses.make_dataclass(
        function.__name__, fields, namespace=described, frozen=True
    )


def _graph(default: Any) -> str | None:
    """The name of the topology that is the default of a parameter, or None."""
    return next((name for name, x in TOPOLOGIES.items() if x is default), None)


def _kind(hint: Any, default: Any) -> Any:
    """The type of an option, or None if the parameter accepts only objects."""
    if _graph(default):
        return typing.cast(Any, Literal)[tuple(TOPOLOGIES)]
    members = typing.get_args(hint)
    if hint == PART:
        return str | None
    if lj.Periods in members:
        return periods.PeriodText
    for member in (hint, *members):
        if typing.get_origin(member) is Literal:
            return member
    for scalar in (bool, float, int, str):
        if scalar in (hint, *members):
            return scalar | None if types.NoneType in members else scalar
    return None


def _class(row: Row) -> type[MethodConfig]:
    options = [_options(function, row) for function in row.functions]
    _check_merge(row, options)
    return dataclasses.make_dataclass(
        row.name.title().replace("-", ""),
        (),
        bases=(*options, MethodConfig),
        namespace={
            "__module__": __name__,
            "name": row.name,
            "first": row.last is None and row.first is not None,
            "is_asynchronous": row.asynchronous is not None,
            "row": row,
        },
        frozen=True,
    )


def _check_merge(row: Row, options: list[type]) -> None:
    """Raises ValueError if factories share an option with another type or default.

    Both would get the value of one of them.
    """
    seen: dict[str, tuple[str, Any]] = {}
    for each in options:
        for field in dataclasses.fields(each):
            found = field.type, field.default
            other, before = seen.setdefault(field.name, (each.__name__, found))
            if found != before:
                raise ValueError(
                    f"{row.name} has two options `{field.name}`: that of {other} has the "
                    f"default {before[1]!r}, that of {each.__name__} {field.default!r}; "
                    "rename one, or give both a default"
                )


METHODS: Mapping[str, type[MethodConfig]] = {row.name: _class(row) for row in ROWS}


def _own(name: str) -> Row:
    """The row of a method of the user, MODULE:FUNCTION.

    The annotation of its result says where it stands in the chain; by default it is last.
    The function is not called here: it may make arrays, and devices are chosen later.

    Raises:
      ValueError: the function cannot be imported, or a parameter has no default.
    """
    module, _, function = name.partition(":")
    refusal = (
        "`method` must be MODULE:FUNCTION, with a module in the current folder or on "
        "PYTHONPATH and a function that returns an lj.Exchange and has a default for every "
        f"parameter, got method={name!r}: "
    )
    try:
        found = importlib.import_module(module)
        factories = dict(inspect.getmembers(found, inspect.isfunction))
        if function not in factories:
            near = meant(function, factories)
            raise AttributeError(f"{module} has no function {function}{near}")
        factory = factories[function]
        inspect.signature(factory).bind()
        result = typing.get_type_hints(factory).get("return", "nothing")
    except Exception as error:  # whatever the module raises
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(refusal + reason) from error
    place = _place(result) or "last"

    @functools.wraps(factory)
    def checked(*args: Any, **options: Any) -> Any:
        made = factory(*args, **options)
        if _place(type(made)) != place:
            kind = type(made).__name__
            says = getattr(result, "__name__", result)
            raise ValueError(f"{refusal}it returned {kind}, its annotation says {says}")
        return made

    fields: dict[str, Any] = {place: checked}
    return Row(name, **fields)


def _place(kind: Any) -> str | None:
    """The field of `Row` for a factory that returns this type, or None for other types."""
    if hasattr(kind, "bind"):  # of `lj.asynchronous.Method`, a protocol
        return "asynchronous"
    if not inspect.isclass(kind) or not issubclass(kind, optax.GradientTransformation):
        return None
    return "last" if issubclass(kind, lj.Exchange) else "first"


@functools.cache
def find(name: str) -> type[MethodConfig]:
    """The class of a method.

    Raises:
      ValueError: no method has this name, or the user's own cannot be imported or used.
    """
    if ":" in name:
        return _class(_own(name))
    if name not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(METHODS)}, or MODULE:FUNCTION for your "
            f"own, got method={name!r}{meant(name, METHODS)}"
        )
    return METHODS[name]


def make(name: str, *values: Any, **options: Any) -> MethodConfig:
    """A method with the given options; raises ValueError like `find`.

    >>> make("easgd", period=4).period
    4
    """
    return find(name)(*values, **options)
