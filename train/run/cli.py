"""The command line: python -m train NAME [--options].

tyro derives the options and --help from the fields of `train.config` and their comments,
and from the factories of the methods and their docstrings.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
import pathlib
import re
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypedDict, TypeVar

import jax
import tyro
from tyro import _errors

import lsgd_jax as lj
from train.config import experiments, settings
from train.config.methods import find
from train.config.schema import SETTINGS, Config, settings_of
from train.process import names
from train.process.exit_status import SUCCESS, WRONG_USAGE
from train.process.messages import meant, suggestion
from train.process.names import HELP, PROGRAM
from train.run import folder as run_folder


FILE = """
--config FILE takes settings from a JSON file: config.json of a run, or some of its lines.
Options on the command line are applied on top.
"""
# How Python's messages about a text that is no number begin.
NUMBERS = {
    "invalid literal for int() with base 10: ": "an int",
    "could not convert string to float: ": "a number",
}
TRUTHS = {"true", "false", "yes", "no", "on", "off", "1", "0"}
T = TypeVar("T")
PATHS = tyro.constructors.ConstructorRegistry()

# Settings that say which run to resume.
WHERE = "name", "runs", "run_dir", "resume"


class Command(NamedTuple):
    """Another command that takes the options of the trainer, too.

    Attributes:
      name: the command, as the user types it.
      options: the function or the dataclass of its own options.
    """

    name: str
    options: Callable[..., Any]


def parse(arguments: Sequence[str], command: Command | None = None) -> Config:
    """Returns the configuration for a command line.

    Settings come from the experiment, or from the run to resume and the workers of its
    latest checkpoint; then from the file of --config; then from the options.

    Args:
      arguments: the command line.
      command: the command whose remaining options these are, for its name in messages.

    Raises:
      ValueError: a wrong command line, or an impossible setting.
      SystemExit: --help, --version or nothing was given, and its answer has been printed.
    """
    if not arguments:
        print(names.usage())
        raise SystemExit(WRONG_USAGE)
    hints = {name: SETTINGS[name].hint for name in SETTINGS if name != "experiment"}
    hints |= {"method": str, "config": pathlib.Path}
    start = next((x for x in arguments[:1] if not x.startswith("-")), "NAME")
    if "--" in arguments:
        raise ValueError(f"-- must be left out; see {PROGRAM} {start} --help")
    given, rest = _given(arguments, hints, f"{PROGRAM} {start}")
    file = settings.read_some(given.pop("config")) if "config" in given else {}
    if "method" in given:
        given["method.name"] = given.pop("method")
    name, rest = _named(rest, file)
    text, experiment = experiments.load(name)
    found = {**file, **given}
    where = settings.changed(experiment, {x: found[x] for x in WHERE if x in found})
    config = settings.changed(_resumed(where) if where.resume else experiment, file)
    method = find(given.get("method.name", config.method.name))
    is_own = method.name == experiment.method.name
    prog = f"{PROGRAM} {name}" + ("" if is_own else f" --method {method.name}")
    own = {name: setting.hint for name, setting in settings_of(method, "method.")}
    options, rest = _given(rest, own, prog)
    given |= options
    if HELP.intersection(rest):
        _print_help(settings.changed(config, given), prog, text)
    if rest:
        raise ValueError(_unknown(rest[0], hints | own, prog, command))
    config = settings.changed(config, given)
    if config.resume:
        run_folder.check_same_experiment(config, run_folder.to_resume(config))
    return config


def _unknown(
    argument: str, known: Mapping[str, Any], prog: str, command: Command | None
) -> str:
    """The message for an argument that neither the trainer nor the command knows."""
    names = [*map(_option, known)]
    where = f"{prog} --help"
    if command is not None:
        names += [_option(name) for name, _ in _hints(command.options)]
        where = f"{command.name} --help and {where}"
    return f"{_unrecognized(argument, names)}; see {where}"


def _named(arguments: list[str], file: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The experiment that a command line or a file names, and the remaining arguments."""
    known = names.experiments()
    # Options of the method, which are not parsed yet, may stand before the name.
    first = [x for x in arguments[:1] if not x.startswith("-")]
    found = [*first, *(x for x in arguments if x in known)]
    rest = list(arguments)
    if found:
        rest.remove(found[0])
    name = found[0] if found else str(file.get("experiment") or file.get("name", ""))
    if name not in known:
        _print_general_help(rest)
        raise ValueError(names.unknown(name, known))
    of = file.get("experiment") or name
    if of != name:
        raise ValueError(f"--config is of {of!r}, not of {name!r}")
    return name, rest


def _given(
    arguments: Sequence[str], hints: dict[str, Any], prog: str
) -> tuple[dict[str, Any], list[str]]:
    """Parses the options of a command line whose types are in `hints`.

    Returns:
      The values of the options that are given, and the remaining arguments.
    """
    given_only: Any = TypedDict("Given", hints, total=False)  # type: ignore
    _check_flags(arguments, hints, prog)
    with one_line_errors(prog):
        return tyro.cli(
            given_only,
            args=arguments,
            return_unknown_args=True,
            add_help=False,
            registry=PATHS,
        )


def _print_general_help(arguments: Sequence[str]) -> None:
    """Prints the version or the usage, if that is asked for, and exits."""
    if list(arguments) == ["--version"]:
        print(f"lsgd_jax {lj.__version__}, jax {jax.__version__}")
        raise SystemExit(SUCCESS)
    if HELP.intersection(arguments):
        print(names.usage())
        raise SystemExit(SUCCESS)


def _print_help(config: Config, prog: str, text: str) -> NoReturn:
    """Prints the options with their values in a configuration, and exits."""
    text = f"{text}\n{FILE}"
    tyro.cli(Config, default=config, prog=prog, description=text, args=["--help"])
    raise AssertionError("tyro exits")


def _resumed(config: Config) -> Config:
    """The configuration of the run that a configuration resumes."""
    from train.run import resharding  # --help does not need to read checkpoints
    from train.run.checkpoints import latest_notes

    folder = run_folder.to_resume(config)
    saved = settings.read(folder / run_folder.CONFIG)
    began_as = saved.experiment or saved.name
    if began_as != config.experiment and began_as in names.experiments():
        raise ValueError(f"{folder} is a run of {began_as!r}, not of {config.experiment!r}")
    kept = {x: getattr(config, x) for x in ("runs", "run_dir", "resume", "experiment")}
    latest = None
    if saved.min_workers is None:  # otherwise the checkpoint is of one process
        latest = resharding.grid(latest_notes(folder / run_folder.CHECKPOINTS))
    return dataclasses.replace(saved, workers=latest or saved.workers, **kept)


@contextlib.contextmanager
def one_line_errors(prog: str, options: Iterable[str] = ()) -> Generator[None]:
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
    hints = dict(_hints(function))
    _check_flags(arguments, hints, prog)
    with one_line_errors(prog, map(_option, hints)):
        return tyro.cli(function, args=arguments, prog=prog, registry=PATHS, **options)


@PATHS.primitive_rule
def _path(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """The rule for paths, which may begin with ~. A shell leaves it in --option=~/x."""
    if kind.type is not pathlib.Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: pathlib.Path(os.path.expanduser(words[0])),
        is_instance=lambda path: isinstance(path, pathlib.Path),
        str_from_instance=lambda path: [str(path)],
    )


def run_with_others(
    function: Callable[..., T], arguments: Sequence[str], prog: str, text: str | None
) -> tuple[T, list[str]]:
    """Like `run`; also returns the arguments that it does not know."""
    settings = {"description": text, "return_unknown_args": True}
    made: Any = run(function, arguments, prog, **settings)
    return made


def options_of(function: Callable[..., Any]) -> list[str]:
    """The options that tyro derives from a function or a dataclass."""
    return [_option(name) for name, _ in _hints(function)]


def _hints(function: Callable[..., Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the names and types of the options that tyro derives from a function."""
    hints = typing.get_type_hints(
        function.__init__ if inspect.isclass(function) else function
    )
    for name in inspect.signature(function).parameters:
        hint = hints.get(name)
        if dataclasses.is_dataclass(hint):
            yield from _hints(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def _option(name: str, prefix: str = "") -> str:
    """The option of a setting.

    >>> _option("data.accept_other_files", "no-")
    '--data.no-accept-other-files'
    """
    group, dot, own = name.replace("_", "-").rpartition(".")
    return f"--{group}{dot}{prefix}{own}"


def _check_flags(arguments: Sequence[str], hints: Mapping[str, Any], prog: str) -> None:
    """Raises ValueError for --resume=True and --no-data.shard, which tyro does not take."""
    words = [part for word in arguments for part in word.split("=", 1)]
    given = list(itertools.pairwise([*words, ""]))
    for name in (name for name, hint in hints.items() if hint is bool):
        on = _option(name)
        off = _option(name, "no-")
        for word, value in given:
            reason = None
            if word.replace("_", "-") in (on, off) and value.lower() in TRUTHS:
                reason = f"{word} takes no value, got {value}; use {on} or {off}"
            elif word.replace("_", "-") == f"--no-{on[2:]}" != off:
                reason = f"unrecognized option {word}; did you mean {off}?"
            if reason:
                raise ValueError(f"{reason}; see {prog} --help")


def _reason(event: _errors.ParseErrorEvent, names: list[str]) -> str | None:
    """The message for a wrong command line, or None for rare errors, which tyro prints."""
    argument = getattr(event, "argument", None)
    option = "" if argument is None else argument.display_name()
    match event:
        case (
            _errors.UnrecognizedArgs(tokens=[unknown, *_])
            | _errors.MissingArgs(unrecognized_tokens=[unknown, *_])
        ):
            return _unrecognized(unknown, names)
        case _errors.InvalidChoice():
            choices = event.choices
            value = event.value
            listed = ", ".join(choices)
            return f"{option} must be one of {listed}, got {value!r}{meant(value, choices)}"
        case _errors.BadValue():
            return f"{option} needs a value"
        case _errors.MissingArgs():
            missing = [given.arg.display_name() for given in event.missing_arguments]
            return f"{', '.join(missing)} must be given"
        case _errors.InstantiationFailure():
            return _of_a_value(option, event.message.partition("\n")[0].rstrip("."))
    return None


def _of_a_value(option: str, message: str) -> str:
    """The message for a value of a wrong type, which Python describes.

    >>> _of_a_value("--steps", "invalid literal for int() with base 10: '1e3'")
    "--steps must be an int, got '1e3'"
    >>> _of_a_value("--rate", "no type matching {None}|FLOAT could be ... from ['a']")
    "--rate must be a number, got 'a'"
    >>> _of_a_value("--betas", "no type matching {None}|{FLOAT FLOAT} could ... ['0.9']")
    "--betas must be two numbers, got '0.9'"
    """
    optional = re.match(r"no type matching \{None\}\|(INT|FLOAT) .*\[(.*)\]", message)
    if optional:
        kind = {"INT": "an int", "FLOAT": "a number"}[optional[1]]
        return f"{option} must be {kind}, got {optional[2]}"
    pair = re.match(r"no type matching \{None\}\|\{FLOAT FLOAT\} .*\[(.*)\]", message)
    if pair:
        return f"{option} must be two numbers, got {pair[1]}"
    for start, kind in NUMBERS.items():
        if message.startswith(start):
            return f"{option} must be {kind}, got {message.removeprefix(start)}"
    return f"{option}: {message}" if option else message


def _unrecognized(argument: str, names: list[str]) -> str:
    given = argument.partition("=")[0].replace("_", "-")
    kind = "option" if argument.startswith("-") else "argument"
    return f"unrecognized {kind} {argument}{suggestion(given, names)}"
