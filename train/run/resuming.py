"""The command that goes on with a run, as a shell takes it."""

import dataclasses
import os
import pathlib
import shlex
from typing import Any

from train import config as configuration
from train.config import FREE_ON_RESUME, Config, DistributedConfig
from train.run.folder import CONFIG


LAUNCHER = "LSGD_JAX_LAUNCHER"  # in the environment: the command of train.launch, up to --
BY_LAUNCHER = {"coordinator", "num_processes", "process_id", "gpus"}

# What the command names anyway.
NAMED = {"runs", "run_dir", "resume", "experiment"}


def resume_command(config: Config, folder: pathlib.Path) -> str:
    """The command that goes on with a run as it is now.

    Resuming takes the settings that the run began with; those that have changed since, and
    those that are no part of a run, are named.
    """
    launcher = os.environ.get(LAUNCHER)
    begun = _known(folder)
    now = configuration.fields(config)
    if launcher is not None:
        begun |= {f"distributed.{x}": now[f"distributed.{x}"] for x in BY_LAUNCHER}
    changed = [
        _option(field, now[field])
        for field in sorted(FREE_ON_RESUME - NAMED)
        if now[field] != begun.get(field, now[field])
    ]
    where = str(folder)
    where = f"./{where}" if where.startswith("-") else where
    name = config.experiment or config.name
    words = [name, "--run-dir", where, "--resume", *sum(changed, [])]
    return f"{launcher or 'python -m train'} {shlex.join(words)}"


def _known(folder: pathlib.Path) -> dict[str, Any]:
    """The settings that resuming a run takes if nothing is said of them."""
    options = dataclasses.fields(DistributedConfig)
    known = {f"distributed.{option.name}": option.default for option in options}
    try:
        return configuration.fields(configuration.read(folder / CONFIG)) | known
    except ValueError:
        return known  # whoever resumes it says what is wrong


def _option(field: str, value: Any) -> list[str]:
    """A setting as it stands on the command line.

    >>> _option("data.accept_other_files", False), _option("log_every", 3)
    (['--data.no-accept-other-files'], ['--log-every', '3'])
    """
    *groups, name = field.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*groups, name if value else f"no-{name}"])]
    return ["--" + ".".join([*groups, name]), str(value)]
