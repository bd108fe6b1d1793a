"""The command line: python -m train NAME [--options]."""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import pkgutil
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tyro
from tyro import _errors

import configs
from train import config as configuration
from train.config import Config, DistributedConfig
from train.config_checks import meant
from train.run import folder as run_folder
from train.task import methods, optimizers


PROGRAM = "python -m train"
T = TypeVar("T")


def experiments() -> dict[str, tuple[str, Config]]:
    """The named experiments in `configs`: what each is, and its configuration.

    >>> list(experiments())[:3]
    ['cifar10-cnn7', 'cifar10-resnet20', 'cifar10-vgg16']
    """
    found = {}
    for module in pkgutil.iter_modules(configs.__path__):
        loaded = importlib.import_module(f"configs.{module.name}")
        name, text = loaded.CONFIG.name, (loaded.__doc__ or "").strip()
        found[name] = text, dataclasses.replace(loaded.CONFIG, experiment=name)
    return found


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the command line asks for.

    With --resume the options left out are those of the run that is resumed, its workers
    those of its latest checkpoint.

    Raises:
      ValueError: a command line that cannot be understood, or a setting that is not
        possible; SystemExit: help was asked for and printed.
    """
    known = experiments()
    name, *others = arguments or [""]
    if name in ("-h", "--help"):
        print(_overview(known))
        raise SystemExit(0)
    if name not in known:
        raise ValueError(
            f"the experiment must be one of {', '.join(known)}, got {name!r}; "
            f"see {PROGRAM} --help"
        )
    text, config = known[name]
    if "--resume" in others:
        config = _resumed(config, others)
    config = _switched(config, others)
    config = _parse(name, text, config, _without_option("method", others))
    if config.resume:
        run_folder.check_same_experiment(config, run_folder.to_resume(config))
    return config


def _overview(known: dict[str, tuple[str, Config]]) -> str:
    """What `--help` says without an experiment: each by the first line of its docstring."""
    width = max(map(len, known))
    lines = [
        f"  {name:{width}}  {text.splitlines()[0]}" for name, (text, _) in known.items()
    ]
    listed = "\n".join(lines)
    return (
        f"usage: {PROGRAM} NAME [--options]\n\nTrains a named experiment:\n\n{listed}\n\n"
        f"The options of an experiment: {PROGRAM} NAME --help\n\n"
        "Compiled programs are kept in ~/.cache/lsgd_jax; JAX_COMPILATION_CACHE_DIR names "
        "another\nfolder, JAX_ENABLE_COMPILATION_CACHE=false keeps none."
    )


def _resumed(config: Config, arguments: Sequence[str]) -> Config:
    """The configuration of the run that the command line wants to resume."""
    from train.run import resharding  # what reads checkpoints is not needed for --help
    from train.run.reading import latest_notes

    # Its processes may have had another rendezvous, which is no part of the experiment.
    where: dict[str, Any] = {"resume": True, "distributed": DistributedConfig()}
    for name in ("runs", "run_dir"):
        given = _option(name, arguments)
        where[name] = getattr(config, name) if given is None else given
    name = _option("name", arguments) or config.name
    folder = run_folder.to_resume(dataclasses.replace(config, name=name, **where))
    saved = configuration.read(folder / run_folder.CONFIG)
    began_as = saved.experiment or saved.name
    if began_as != config.experiment and began_as in experiments():
        raise ValueError(f"{folder} is a run of {began_as!r}, not of {config.experiment!r}")
    where["experiment"] = config.experiment
    latest = resharding.grid(latest_notes(folder / run_folder.CHECKPOINTS))
    return dataclasses.replace(saved, workers=latest or saved.workers, **where)


def _switched(config: Config, arguments: Sequence[str]) -> Config:
    """The configuration with the method, optimizer and schedule that were asked for.

    The experiment's own options of another method, or of an optimizer or a schedule to
    which they do not apply, are left out.
    """
    method = _option("method", arguments)
    if method is None and "--method" in arguments:
        method = ""  # asked for, and no name given
    if method is not None and methods.find(method) is not type(config.method):
        config = dataclasses.replace(config, method=methods.make(method))
    asked = {field: _option(f"optimizer.{field}", arguments) for field in CHOICES}
    chosen = {field: x for field, x in asked.items() if x in CHOICES[field]}
    optimizer = optimizers.switched(config.optimizer, **chosen)
    return dataclasses.replace(config, optimizer=optimizer)


# The fields of the optimizer that decide which of its other ones apply.
CHOICES = {"name": optimizers.NAMES, "schedule": optimizers.SCHEDULE_NAMES}


def _option(name: str, arguments: Sequence[str]) -> str | None:
    """The last value of --name VALUE or --name=VALUE, or None."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None]):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == f"--{name.replace('_', '-')}":
            found = value if equals else following
    return found


def _without_option(name: str, arguments: Sequence[str]) -> list[str]:
    """The arguments without --name VALUE or --name=VALUE."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == f"--{name}":
            next(rest, None)
        elif not argument.startswith(f"--{name}="):
            kept.append(argument)
    return kept


def _parse(name: str, text: str, config: Config, arguments: Sequence[str]) -> Config:
    """The configuration with the options of a command line.

    Args:
      name, text, config: the experiment.
      arguments: the options, without --method.
    """
    out, err, program = io.StringIO(), io.StringIO(), f"{PROGRAM} {name}"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            parsed, unknown = tyro.cli(
                Config,
                prog=program,
                description="",
                default=config,
                args=arguments,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code:
            reason = one_line(err.getvalue())
            raise ValueError(f"{reason}; see {program} --help") from None
        # tyro would run the lines of the experiment's table into one paragraph.
        usage, *options = (line.rstrip() for line in out.getvalue().rstrip().split("\n"))
        print(usage, "", text, *options, sep="\n")
        raise
    if unknown:
        raise ValueError(_unrecognized(unknown[0], config, program))
    return parsed


def _unrecognized(argument: str, config: Config, program: str) -> str:
    """What is said of an argument that no option knows, with the option that is nearest."""
    given = argument.partition("=")[0].replace("_", "-").removeprefix("--")
    of_methods = {
        f"method.{field.name.replace('_', '-')}"
        for method in methods.METHODS.values()
        for field in dataclasses.fields(method)
    }
    if given in of_methods:
        name = config.method.name
        return f"--{given} is no option of {name}; see {program} --method {name} --help"
    options = {field.replace("_", "-") for field in configuration.fields(config)}
    near = difflib.get_close_matches(given, options - {"method.name"}, n=1)
    meant = f"; did you mean --{near[0]}?" if near else ""
    return f"unrecognized option {argument}{meant}; see {program} --help"


def one_line(message: str) -> str:
    """What tyro prints about an error, without its title and what follows the message.

    >>> one_line(" Wrong \\n ----- \\n  no value for \\n  --foo.\\n ----- \\n  For help")
    'no value for --foo'
    """
    parts = re.split(r"^ *-+ *$", message, flags=re.MULTILINE)
    text = " ".join(parts[min(1, len(parts) - 1)].split()).partition(" Got errors:")[0]
    return re.sub(r"^Error parsing (__[\w-]+__: |\w+: )?", "", text).removesuffix(".")


@contextlib.contextmanager
def one_line_errors(prog: str, names: Iterable[str] = ()) -> Iterator[None]:
    """Makes wrong usage of a command line, which tyro reads, a ValueError of one line.

    tyro would print a box and exit. It has no public hook for that; this one is private.

    Args:
      prog: the command whose --help the line names.
      names: options and other words, the nearest of which is proposed for a typo.
    """
    names = list(names)

    def refuse(event: _errors.ParseErrorEvent) -> None:
        reason = _reason(event, names)
        if reason is not None:
            raise ValueError(f"{reason}; see {prog} --help") from None

    with _errors.on_parse_error(refuse):
        yield


def run(
    function: Callable[..., T], arguments: Sequence[str], prog: str, **options: Any
) -> T:
    """Calls a function with the options of a command line, or makes a dataclass of them.

    tyro reads names, types, defaults and help from the signature and the docstring.

    Args:
      function: the function, or the dataclass.
      arguments: the command line.
      prog: the command, as it is typed.
      options: of `tyro.cli`.

    Raises:
      ValueError: a command line that cannot be understood.

    >>> def double(number: int = 1): return 2 * number
    >>> run(double, ["--number", "3"], "double")
    6
    >>> run(double, ["--nunber", "3"], "double")
    Traceback (most recent call last):
    ValueError: unrecognized option --nunber; did you mean --number?; see double --help
    """
    with one_line_errors(prog, _names(function)):
        return tyro.cli(function, args=arguments, prog=prog, **options)


def _names(function: Callable[..., Any], prefix: str = "--") -> Iterator[str]:
    """The options that tyro makes of the parameters of a function, or of a dataclass."""
    hints = typing.get_type_hints(
        function.__init__ if inspect.isclass(function) else function
    )
    for name in inspect.signature(function).parameters:
        option, hint = prefix + name.replace("_", "-"), hints.get(name)
        if dataclasses.is_dataclass(hint):
            yield from _names(typing.cast(type, hint), f"{option}.")
        else:
            yield option


def _reason(event: _errors.ParseErrorEvent, names: list[str]) -> str | None:
    """The line for a wrong command line; None leaves a rare one to tyro."""
    argument = getattr(event, "argument", None)
    option = "" if argument is None else argument.display_name()
    match event:
        case (
            _errors.UnrecognizedArgs(tokens=[unknown, *_])
            | _errors.MissingArgs(unrecognized_tokens=[unknown, *_])
        ):
            given = unknown.partition("=")[0].replace("_", "-")
            return f"unrecognized option {unknown}{meant(given, names)}"
        case _errors.InvalidChoice():
            choices, value = event.choices, event.value
            listed = ", ".join(choices)
            return f"{option} must be one of {listed}, got {value!r}{meant(value, choices)}"
        case _errors.BadValue():
            return f"{option} needs a value"
        case _errors.MissingArgs():
            missing = [given.arg.display_name() for given in event.missing_arguments]
            return f"{', '.join(missing)} must be given"
        case _errors.MissingSubcommand():
            return (
                f"one of {', '.join(event.subcommand_spec.parser_from_name)} must be given"
            )
        case _errors.InstantiationFailure():
            message = event.message.splitlines()[0]
            return f"{option}: {message}" if option else message
    return None
