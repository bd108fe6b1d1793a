"""The shell command that resumes a run."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
from typing import Any

from train.config import settings
from train.config.schema import (
    DISTRIBUTED,
    FREE_ON_RESUME,
    SETTINGS,
    Config,
    DistributedConfig,
    fields,
)
from train.launch import LAUNCHER, TOLD
from train.process.messages import to_resume
from train.run.folder import CONFIG, of_all


# Settings that the command names anyway, and those of a single process of the run.
LEFT_OUT = {"runs", "run_dir", "resume", "experiment"} | {
    f"distributed.{name}" for name in ("coordinator", "num_processes", "process_id", "gpus")
}


def resume_command(config: Config, folder: pathlib.Path) -> str:
    """Returns the command that resumes a run with its current settings.

    Resuming uses the settings that the run began with, so the command names those that have
    changed since. It starts several processes only if `train.launch` did.
    """
    launcher = os.environ.get(LAUNCHER)
    begun = _known(folder)
    now = fields(config)
    changed = [
        _option(field, now[field])
        for field in sorted(FREE_ON_RESUME - LEFT_OUT)
        if launcher is not None or field not in DISTRIBUTED
        if now[field] != begun.get(field, now[field])
    ]
    where = str(of_all(config, folder))
    where = f"./{where}" if where.startswith("-") else where
    name = config.experiment or config.name
    words = [name, "--run-dir", where, "--resume", *sum(changed, [])]
    return f"{launcher or 'python -m train'} {shlex.join(words)}"


def how_to_resume(config: Config, folder: pathlib.Path, when: str = "to resume") -> str:
    """Names the command that resumes a run, or says that its folder is gone."""
    return to_resume(resume_command(config, folder), folder / CONFIG, when)


def tell_launcher(config: Config, folder: pathlib.Path) -> None:
    """Tells `train.launch` how to resume the run, in case that all processes die."""
    file = os.environ.get(TOLD)
    if file:
        told = [resume_command(config, folder), str(folder / CONFIG)]
        with contextlib.suppress(OSError):
            pathlib.Path(file).write_text(json.dumps(told))


def is_gone(folder: pathlib.Path) -> bool:
    """Whether a run folder that was there is not there any more."""
    return not (folder / CONFIG).exists()


def _known(folder: pathlib.Path) -> dict[str, Any]:
    """The settings that a resumed run has by default."""
    options = dataclasses.fields(DistributedConfig)
    known = {f"distributed.{option.name}": option.default for option in options}
    try:
        return fields(settings.read(folder / CONFIG)) | known
    except ValueError:
        return known  # resuming the run will say what is wrong


def _option(field: str, value: Any) -> list[str]:
    """The words that give a setting on the command line.

    >>> _option("data.accept_other_files", False), _option("log_every", 3)
    (['--data.no-accept-other-files'], ['--log-every', '3'])
    >>> _option("data.files", ("a", "b"))
    ['--data.files', 'a', 'b']
    """
    *groups, name = field.replace("_", "-").split(".")
    if isinstance(value, bool) and SETTINGS[field].hint is bool:
        return ["--" + ".".join([*groups, name if value else f"no-{name}"])]
    option = "--" + ".".join([*groups, name])
    values = value
    if not isinstance(value, tuple):
        values = (value,)
    if len(values) == 1 and str(values[0]).startswith("-"):
        return [f"{option}={values[0]}"]
    return [option, *map(str, values)]
