"""The command line: python -m train NAME [--options]."""

import contextlib
import dataclasses
import importlib
import io
import pkgutil
import re
import sys
from collections.abc import Sequence
from typing import Any

import tyro

import configs
from train import config as configuration
from train.config import Config, DistributedConfig
from train.run import folder as run_folder
from train.run import resharding as elastic
from train.run.checkpoints import latest_notes
from train.task.methods import find


def experiments() -> dict[str, tuple[str, Config]]:
    """The named experiments in `configs`: what each is, and its configuration.

    >>> sorted(experiments())
    ['cifar10-cnn7', 'cifar10-resnet20', 'cifar10-vgg16', 'digits', 'imagenet-resnet50']
    """
    found = {}
    for module in pkgutil.iter_modules(configs.__path__):
        loaded = importlib.import_module(f"configs.{module.name}")
        found[loaded.CONFIG.name] = ((loaded.__doc__ or "").strip(), loaded.CONFIG)
    return found


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the command line asks for.

    With --resume the options left out are those of the run that is resumed, its workers
    those of its latest checkpoint.

    Raises:
      ValueError: a setting that is not possible; SystemExit: the command line can not be
        understood (status 2) or asks for help (status 0).
    """
    known, name = experiments(), arguments[0] if arguments else ""
    method = _option("method", arguments)
    if method is None and "--method" in arguments:
        method = ""  # asked for, and no name given
    if name in known:
        summary, config = known[name]
        if "--resume" in arguments:
            config = _resumed(config, arguments)
        if method is not None and find(method) is not type(config.method):
            config = dataclasses.replace(config, method=find(method)())
        known[name] = (summary, config)
    config = _parse(known, _without_option("method", arguments))
    if config.resume:
        run_folder.check_same_experiment(config, run_folder.to_resume(config))
    return config


def _resumed(config: Config, arguments: Sequence[str]) -> Config:
    """The configuration of the run that the command line wants to resume."""
    # Where its processes found together, which may have been elsewhere, is of no account.
    where: dict[str, Any] = {"resume": True, "distributed": DistributedConfig()}
    for name in ("runs", "run_dir"):
        given = _option(name, arguments)
        where[name] = getattr(config, name) if given is None else given
    folder = run_folder.to_resume(dataclasses.replace(config, **where))
    saved = configuration.read(folder / run_folder.CONFIG)
    if saved.name != config.name:
        raise ValueError(f"{folder} is a run of {saved.name!r}, not of {config.name!r}")
    latest = elastic.grid(latest_notes(folder / run_folder.CHECKPOINTS))
    return dataclasses.replace(saved, workers=latest or saved.workers, **where)


def _option(name: str, arguments: Sequence[str]) -> str | None:
    """The value of --name VALUE or --name=VALUE, or None."""
    for argument, following in zip(arguments, [*arguments[1:], None]):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == f"--{name.replace('_', '-')}":
            return value if equals else following
    return None


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


def _parse(known: dict[str, tuple[str, Config]], arguments: Sequence[str]) -> Config:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.extras.overridable_config_cli(
                known, prog="python -m train", args=arguments
            )
    except SystemExit as stop:
        if stop.code:
            print(f"error: {one_line(printed.getvalue())}", file=sys.stderr)
        raise


def one_line(message: str) -> str:
    """A message in a box, without the box.

    >>> one_line("╭─ Wrong ─────╮\\n│ no option   │\\n│ --foo       │\\n╰─────────────╯\\n")
    'Wrong: no option --foo'
    """
    title = re.search(r"╭─+ (.*?) ─+╮", message)
    body = re.sub(
        r"[╭╮╰╯│─]+|-{5,}", " ", message.replace(title[0], "") if title else message
    )
    text = " ".join(body.split())
    if title and not text.startswith(title[1]):
        text = f"{title[1]}: {text}"
    text = re.sub(r"^Value error:? Error parsing \w+: ", "", text)
    return re.sub(r" For full helptext, (see|run) ", "; see ", text)
