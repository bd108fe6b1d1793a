"""The names of commands and experiments, and answers that need not wait for jax.

Importing jax takes seconds. Nothing is imported here: names are those of files, and a
description is read from the file.
"""

import ast
import pathlib
from collections.abc import Iterable, Sequence

from train.process.exit_status import SUCCESS, WRONG_USAGE
from train.process.messages import meant


PROGRAM = "python -m train"
DESCRIPTION = f"""\
Trains a named experiment. {PROGRAM} NAME --help explains its options.

Compiled programs are kept in ~/.cache/lsgd_jax; JAX_COMPILATION_CACHE_DIR names another
folder, JAX_ENABLE_COMPILATION_CACHE=false keeps none.
"""
HELP = {"-h", "--help"}
TRAINER = pathlib.Path(__file__).parents[1]
CONFIGS = TRAINER.parent / "configs"
# Commands whose first argument is the name of an experiment.
OF_AN_EXPERIMENT = (
    "train",
    "train.compare",
    "train.compile",
    "train.plan",
    "train.simulate",
)


def experiments() -> list[str]:
    """The names of all experiments: those of the files, with hyphens.

    >>> experiments()[:3]
    ['arrays', 'cifar10-cnn7', 'cifar10-resnet20']
    """
    files = [path.stem for path in CONFIGS.glob("*.py")]
    return sorted(x.replace("_", "-") for x in files if not x.startswith("_"))


def commands() -> list[str]:
    """The names of all commands.

    >>> "train.plots" in commands()
    True
    """
    files = {path.stem for path in TRAINER.glob("*.py") if not path.stem.startswith("_")}
    folders = {path.parent.name for path in TRAINER.glob("*/__main__.py")}
    return ["train", *(f"train.{name}" for name in sorted(files | folders))]


def summary(file: pathlib.Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def usage() -> str:
    """The usage of the trainer, with a line for each experiment."""
    files = {name: CONFIGS / f"{name.replace('-', '_')}.py" for name in experiments()}
    lines = [f"{name:19}{summary(file)}" for name, file in files.items()]
    return "\n".join([f"usage: {PROGRAM} NAME [OPTIONS]\n\n{DESCRIPTION}", *lines])


def unknown(given: str, known: Iterable[str]) -> str:
    """The message for a name that is no experiment.

    >>> print(unknown("tekst", ["text"]))
    expected one of text, got 'tekst'; did you mean text?; see python -m train --help
    """
    known = list(known)
    near = meant(given, known)
    if f"train.{given}" in commands():
        near = f"; did you mean {PROGRAM}.{given}?"
    return f"expected one of {', '.join(known)}, got {given!r}{near}; see {PROGRAM} --help"


def is_general(arguments: Sequence[str]) -> bool:
    """Whether a command line of the trainer names no experiment and asks for help."""
    if not arguments:
        return True
    names_one = not set(experiments()).isdisjoint(arguments)
    return not names_one and not HELP.isdisjoint(arguments)


def main(arguments: list[str]) -> int:
    """Prints the usage of the trainer. Nothing at all is wrong usage."""
    print(usage())
    return SUCCESS if arguments else WRONG_USAGE


def check(command: str, arguments: Sequence[str]) -> None:
    """Raises ValueError for a command that does not exist, or an unknown experiment.

    Args:
      command: the module that Python is told to run.
      arguments: its command line.
    """
    known = commands()
    is_package = (TRAINER / command.rpartition(".")[2]).is_dir()
    if command not in known and command.count(".") == 1 and not is_package:
        near = meant(command, known, "python -m ")
        raise ValueError(f"there is no command python -m {command}{near}")
    name = next(iter(arguments), "-")
    is_name = command in OF_AN_EXPERIMENT and not name.startswith("-")
    if is_name and name not in experiments() and not is_general(arguments):
        raise ValueError(unknown(name, experiments()))
