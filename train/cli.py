"""The command line: python -m train NAME [--options].

tyro derives the options and --help from the fields of `train.config` and their comments,
and from the factories of the methods and their docstrings.
"""

import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jax
import tyro
from tyro import _errors

import configs
import lsgd_jax as lj
from train import config as configuration
from train.config import Config
from train.proposals import meant
from train.run import folder as run_folder


PROGRAM = "python -m train"
DESCRIPTION = f"""\
Trains a named experiment. {PROGRAM} NAME --help explains its options.

Compiled programs are kept in ~/.cache/lsgd_jax; JAX_COMPILATION_CACHE_DIR names another
folder, JAX_ENABLE_COMPILATION_CACHE=false keeps none.
"""
FILE = """
--config FILE takes settings from a JSON file: config.json of a run, or some of its lines.
Options on the command line are applied on top.
"""
T = TypeVar("T")

# Options that are read first because the defaults of others depend on them.
CHOICES = (
    "method.name model data.name optimizer.name optimizer.schedule steps name runs run_dir "
    "resume"
).split()


def experiments() -> dict[str, tuple[str, Config]]:
    """The named experiments in `configs`, as (description, configuration).

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
    """Returns the configuration for a command line.

    With --resume, the defaults are the settings of the run and the workers of its latest
    checkpoint.

    Raises:
      ValueError: a wrong command line, or an impossible setting.
      SystemExit: --help or --version was given and has been printed.
    """
    known, prog, options = experiments(), PROGRAM, []
    some, arguments = _settings_in_file(arguments)
    if list(arguments) == ["--version"]:
        print(f"lsgd_jax {lj.__version__}, jax {jax.__version__}")
        raise SystemExit(0)
    if some and (not arguments or arguments[0].startswith("--")):
        arguments = [str(some.get("experiment") or some.get("name", "")), *arguments]
    name, *rest = arguments or [""]
    shown = {each: (text.partition("\n")[0], x) for each, (text, x) in known.items()}
    if name in known:
        text, config = known[name]
        config, rest, prog = _chosen(config, rest, some)
        shown[name] = text + "\n" + FILE, config
        fields = configuration.fields(config).keys() - {"method.name", "experiment"}
        options = [f"--{x.replace('_', '-')}" for x in fields | {"method", "config"}]
    elif name not in ("-h", "--help"):
        raise ValueError(
            f"expected one of {', '.join(known)}, got {name!r}{meant(name, known)}; see "
            f"{PROGRAM} --help"
        )
    with one_line_errors(prog, options):
        config = tyro.extras.overridable_config_cli(
            shown, prog=PROGRAM, description=DESCRIPTION, args=[name, *rest]
        )
    if config.resume:
        run_folder.check_same_experiment(config, run_folder.to_resume(config))
    return config


def _settings_in_file(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings in the file of --config, if any, and the remaining arguments."""

    def of_file(config: pathlib.Path | None = None) -> dict[str, Any]:
        return {} if config is None else configuration.read_some(config)

    with one_line_errors(PROGRAM):
        return tyro.cli(of_file, args=arguments, return_unknown_args=True, add_help=False)


def _chosen(
    config: Config, arguments: Sequence[str], some: Mapping[str, Any]
) -> tuple[Config, list[str], str]:
    """Applies the settings of a file, and the options that choose defaults.

    Returns:
      The configuration for the other options to override, those options, and the command
      whose --help explains them.
    """
    own, prog = config.method.name, f"{PROGRAM} {config.experiment}"
    config = _overlaid(config, some)
    choices, rest = _choices(config, arguments, prog)
    if choices["resume"]:
        config = _overlaid(_resumed(config, choices), some)
        choices, rest = _choices(config, arguments, prog)
    name = choices["method.name"]
    prog += "" if name == own else f" --method {name}"
    return configuration.switched(config, choices), rest, prog


def _overlaid(config: Config, some: Mapping[str, Any]) -> Config:
    of = some.get("experiment") or config.experiment
    if of != config.experiment:
        raise ValueError(f"--config is of {of!r}, not of {config.experiment!r}")
    return configuration.overlaid(config, some) if some else config


def _choices(
    config: Config, arguments: Sequence[str], prog: str
) -> tuple[dict[str, Any], list[str]]:
    """Parses the choices of a command line.

    Args:
      config: the defaults.
      arguments: the command line.
      prog: the command whose --help explains the options.

    Returns:
      The choices by their full names, and the remaining arguments.
    """
    values, options = configuration.fields(config), []
    for name in CHOICES:
        is_method = name == "method.name"
        hint = str if is_method else configuration.SETTINGS[name].hint
        option = tyro.conf.arg(name="method" if is_method else name)
        default = dataclasses.field(default=values[name])
        options.append((name.replace(".", "_"), Annotated[hint, option], default))
    made = dataclasses.make_dataclass("Choices", options)
    with one_line_errors(prog):
        chosen, rest = tyro.cli(
            made, args=arguments, return_unknown_args=True, add_help=False
        )
    return dict(zip(CHOICES, dataclasses.astuple(chosen))), rest


def _resumed(config: Config, choices: Mapping[str, Any]) -> Config:
    """The configuration of the run to resume."""
    from train.run import resharding  # --help does not need to read checkpoints
    from train.run.checkpoints import latest_notes

    where = {name: choices[name] for name in ("runs", "run_dir", "resume")}
    wanted = dataclasses.replace(config, name=choices["name"], **where)
    folder = run_folder.to_resume(wanted)
    saved = configuration.read(folder / run_folder.CONFIG)
    began_as = saved.experiment or saved.name
    if began_as != config.experiment and began_as in experiments():
        raise ValueError(f"{folder} is a run of {began_as!r}, not of {config.experiment!r}")
    where["experiment"] = config.experiment
    latest = resharding.grid(latest_notes(folder / run_folder.CHECKPOINTS))
    return dataclasses.replace(saved, workers=latest or saved.workers, **where)


@contextlib.contextmanager
def one_line_errors(prog: str, options: Iterable[str] = ()) -> Iterator[None]:
    """Raises a ValueError of one line for a wrong command line that tyro parses.

    tyro itself would print a box and exit. Its hook for parse errors is private so far.

    Args:
      prog: the command whose --help the message names.
      options: the known options; the message suggests the nearest one for a typo.
    """
    names = list(options)

    def refuse(event: _errors.ParseErrorEvent) -> None:
        reason = _reason(event, names)
        if reason is not None:
            raise ValueError(f"{reason}; see {prog} --help") from None

    with _errors.on_parse_error(refuse):
        yield


def run(
    function: Callable[..., T], arguments: Sequence[str], prog: str, **options: Any
) -> T:
    """Calls a function, or builds a dataclass, with the options of a command line.

    tyro takes names, types, defaults and help from the signature and the docstring.

    Args:
      function: the function or the dataclass.
      arguments: the command line.
      prog: the command, as the user types it.
      options: further arguments of `tyro.cli`.

    Raises:
      ValueError: a wrong command line.

    >>> def double(number: int = 1): return 2 * number
    >>> run(double, ["--number", "3"], "double")
    6
    >>> run(double, ["--nunber", "3"], "double")
    Traceback (most recent call last):
    ValueError: unrecognized option --nunber; did you mean --number?; see double --help
    """
    with one_line_errors(prog, _names(function)):
        return tyro.cli(function, args=arguments, prog=prog, **options)


def run_with_others(
    function: Callable[..., T], arguments: Sequence[str], prog: str, text: str | None
) -> tuple[T, list[str]]:
    """Like `run`; also returns the arguments that it does not know."""
    settings = {"description": text, "return_unknown_args": True}
    made: Any = run(function, arguments, prog, **settings)
    return made


def _names(function: Callable[..., Any], prefix: str = "--") -> Iterator[str]:
    """Yields the options that tyro derives from a function or a dataclass."""
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
    """The message for a wrong command line, or None for rare errors, which tyro prints."""
    argument = getattr(event, "argument", None)
    option = "" if argument is None else argument.display_name()
    match event:
        case (
            _errors.UnrecognizedArgs(tokens=[unknown, *_])
            | _errors.MissingArgs(unrecognized_tokens=[unknown, *_])
        ):
            given = unknown.partition("=")[0].replace("_", "-")
            kind = "option" if unknown.startswith("-") else "argument"
            return f"unrecognized {kind} {unknown}{_suggestion(given, names)}"
        case _errors.InvalidChoice():
            choices, value = event.choices, event.value
            listed = ", ".join(choices)
            return f"{option} must be one of {listed}, got {value!r}{meant(value, choices)}"
        case _errors.BadValue():
            return f"{option} needs a value"
        case _errors.MissingArgs():
            missing = [given.arg.display_name() for given in event.missing_arguments]
            return f"{', '.join(missing)} must be given"
        case _errors.InstantiationFailure():
            message = event.message.splitlines()[0].rstrip(".")
            return f"{option}: {message}" if option else message
    return None


def _suggestion(given: str, names: list[str]) -> str:
    """A suggestion for an unknown option, or '' if no option is near.

    >>> _suggestion("--momentum", ["--momentary", "--optimizer.momentum"])
    '; did you mean --optimizer.momentum?'
    >>> _suggestion("--method.wire", ["--method", "--method.until"])
    ''
    """
    same = {f"{given}.name", given.removesuffix(".name")}
    same |= {name for name in names if name.endswith(f".{given.lstrip('-')}")}
    if same := sorted(same.intersection(names)):
        return f"; did you mean {same[0]}?"
    group = given[: given.rfind(".") + 1]
    siblings = [name.removeprefix(group) for name in names if name.startswith(group)]
    if not siblings:
        group, siblings = "", names
    return meant(given.removeprefix(group), siblings, group)
