"""Words of other libraries, and what they are called here, for messages."""

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar


class Meant(NamedTuple):
    """An argument, and how it is written."""

    argument: str
    how: str


STEPS_BETWEEN = Meant("period", "`period=`, the steps between exchanges")
OUTER_STEP = Meant("outer", "`outer=optax.sgd(learning_rate, momentum=0.9, nesterov=True)`")
FORMAT = Meant("wire", "`wire=`, such as wire='int8'")
GROUP = Meant("axes", "`axes=`, the mesh axes of the group")
GRID = Meant("nodes", "`nodes=` and `locals=`, whose product is the number of workers")

# Arguments, as torch, torchft, hivemind and others call them.
ARGUMENTS = {
    "every": STEPS_BETWEEN,
    "sync_every": STEPS_BETWEEN,
    "sync_period": STEPS_BETWEEN,
    "interval": STEPS_BETWEEN,
    "local_steps": STEPS_BETWEEN,
    "inner_steps": STEPS_BETWEEN,
    "H": STEPS_BETWEEN,
    "tau": STEPS_BETWEEN,
    "outer_lr": OUTER_STEP,
    "outer_learning_rate": OUTER_STEP,
    "outer_momentum": OUTER_STEP,
    "outer_optimizer": OUTER_STEP,
    "outer_opt": OUTER_STEP,
    "compression": FORMAT,
    "quantization": FORMAT,
    "quantize": FORMAT,
    "should_quantize": FORMAT,
    "bits": FORMAT,
    "process_group": GROUP,
    "group": GROUP,
    "axis_name": GROUP,
    "lr": Meant("learning_rate", "`learning_rate=`"),
    "num_fragments": Meant("fragments", "`fragments=`"),
    "fragment_sync_delay": Meant("delay", "`delay=`"),
    "workers": GRID,
    "num_workers": GRID,
    "n_workers": GRID,
    "world_size": GRID,
    "num_replicas": GRID,
}

# Public names, in lower case and without underscores.
NAMES = {
    "ddp": "allreduce",
    "distributeddataparallel": "allreduce",
    "pmean": "allreduce",
    "fedavg": "local_sgd",
    "modelaverager": "local_sgd",
    "periodicmodelaverager": "local_sgd",
    "postlocalsgdoptimizer": "local_sgd",
    "streamingdiloco": "diloco",
    "slowmomentumoptimizer": "slowmo",
    "elasticaveraging": "easgd",
    "leadersgd": "lsgd",
    "worker": "Workers",
}


def name_meant(name: str, known: Collection[str]) -> str | None:
    """The public name that stands for a word, if there is one.

    >>> name_meant("DiLoCo", ["diloco", "lsgd"])
    'diloco'
    """
    plain = {_plain(each): each for each in known if not each.startswith("_")}
    return plain.get(_plain(NAMES.get(_plain(name), name)))


def argument_meant(word: str, known: Collection[str]) -> str | None:
    """How an argument is written for which there is another word.

    >>> argument_meant("lr", ["period", "learning_rate"])
    '`learning_rate=`'
    >>> argument_meant("perod", ["period", "learning_rate"])
    '`period=`'
    """
    meant = ARGUMENTS.get(word)
    if meant is not None and meant.argument in known:
        return meant.how
    similar = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f"`{similar[0]}=`" if similar else None


P = ParamSpec("P")
T = TypeVar("T")


def telling_words(function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function so that a TypeError about an argument says what is meant."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def told(*args: P.args, **named: P.kwargs) -> T:
        try:
            return function(*args, **named)
        except TypeError as error:
            advice = _advice(signature, named)
            if advice is None:
                raise
            raise TypeError(f"{error}; did you mean {advice}?") from None

    return told


def _advice(signature: inspect.Signature, named: Mapping[str, Any]) -> str | None:
    """How the first argument is written that the signature does not have."""
    known = set[str]()
    for parameter in signature.parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            known.add(parameter.name)
            continue
        # ``**options: Unpack[Options]`` are the fields of a typed dictionary.
        for options in filter(typing.is_typeddict, typing.get_args(parameter.annotation)):
            known.update(options.__annotations__)
    unknown = [name for name in named if name not in known]
    return argument_meant(unknown[0], sorted(known)) if unknown else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
