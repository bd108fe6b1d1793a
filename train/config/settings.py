"""Reads, writes, compares and changes configurations: settings by their full names."""

import contextlib
import dataclasses
import json
import os
import pathlib
import types
import typing
from collections.abc import Generator, Mapping, Set
from typing import Any

import lsgd_jax as lj
from train.config import methods
from train.config.schema import (
    FREE_ON_RESUME,
    PATH,
    SETTINGS,
    Config,
    Setting,
    fields,
    flat,
    nested,
    settings_of,
    without_effect,
)
from train.process.messages import suggestion


# The default learning rate of each optimizer when another one is chosen: usual values
# differ by orders of magnitude.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3, "lion": 1e-4, "muon": 1e-2, "lars": 10.0}

# The format of run folders. 1, which is not noted in them: lsgd_jax 0.1.0.
FORMAT = 2

# Settings of runs of 0.3 that are gone, with the value that every run has now. Another
# `method.late` of today has other values.
REMOVED = {"method.late": "pull", "method.judged_by": "own"}


def differences(old: Config, new: Config, free: Set[str] = FREE_ON_RESUME) -> list[str]:
    """Describes the settings that make `new` another experiment, except for `free` ones.

    >>> old = Config(name="a", model="cnn7")
    >>> differences(old, dataclasses.replace(old, seed=1, steps=7))
    ['seed: the run has 0, the command says 1']
    """
    if "cosine" in (old.optimizer.schedule, new.optimizer.schedule):
        free = free - {"steps"}  # the learning rate of every step depends on it
    before = fields(old)
    after = fields(new)
    both = before.keys() & after.keys() - free
    return [
        f"{name}: the run has {before[name]!r}, the command says {after[name]!r}"
        for name in sorted(both)
        if before[name] != after[name]
    ]


def began_with(config: Config) -> dict[str, Any]:
    """The settings that never change during a run, as JSON represents them."""
    kept = {name: x for name, x in fields(config).items() if name not in FREE_ON_RESUME}
    del kept["name"]
    return json.loads(json.dumps(kept))


def changed(config: Config, given: Mapping[str, Any]) -> Config:
    """Returns the configuration with the given settings, by their full names.

    Other settings that do not belong to the new choices take their defaults. In a shorter
    run the warm-up takes at most half of the steps, unless the run is resumed.

    Args:
      config: the configuration.
      given: settings of a file or a command line. Lists stand for tuples, as in JSON.

    Raises:
      ValueError: a setting is unknown, of a wrong type or impossible.

    >>> from train.config.schema import OptimizerConfig
    >>> old = Config("a", "cnn7", optimizer=OptimizerConfig(momentum=0.9, clip=1.0))
    >>> new = changed(old, {"method.name": "easgd", "optimizer.name": "adamw"})
    >>> new.method.name, new.optimizer.momentum, new.optimizer.learning_rate
    ('easgd', None, 0.001)
    """
    if not given:
        return config
    old = fields(config)
    given = _restored({"method.name": config.method.name, **given})
    new = old | given
    defaults = {}
    if new["method.name"] != old["method.name"]:
        for option in dataclasses.fields(config.method):
            del new[f"method.{option.name}"]
    if new["optimizer.name"] != old["optimizer.name"]:
        defaults["optimizer.learning_rate"] = USUAL_RATES[new["optimizer.name"]]
    if new["steps"] < old["steps"] and not new["resume"]:
        warmup = min(new["optimizer.warmup_steps"], max(0, new["steps"] // 2))
        defaults["optimizer.warmup_steps"] = warmup
    defaults |= {name: SETTINGS[name].default for name, _ in without_effect(new)}
    made = _built(new | defaults | given)
    # A run that began without them may be resumed.
    if made.optimizer.schedule == "drops" and not (made.optimizer.drop_at or made.resume):
        raise ValueError(
            "`optimizer.drop_at` must have the steps of the drops with "
            "optimizer.schedule=drops, got optimizer.drop_at=()"
        )
    return made


def _built(values: Mapping[str, Any]) -> Config:
    """The configuration with settings by their full names; others take their defaults."""
    groups: dict[str, dict[str, Any]] = {"": {}, "method": {}}
    for name, value in values.items():
        group, _, own = name.rpartition(".")
        groups.setdefault(group, {})[own] = value
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    own = groups.pop("")
    method = methods.make(**groups.pop("method"))
    made: dict[str, Any] = {name: kinds[name](**group) for name, group in groups.items()}
    return Config(**own, **made, method=method)


def write(config: Config, path: os.PathLike) -> None:
    """Writes the configuration to a new JSON file, without the rendezvous."""
    values = nested(config)
    del values["distributed"]
    with open(path, "x") as file:
        json.dump({"format": FORMAT} | values, file, indent=2)
        file.write("\n")


def read(path: os.PathLike) -> Config:
    """Reads a configuration that `write` wrote.

    Raises:
      ValueError: the file is missing, does not hold a configuration, or belongs to a
        version whose checkpoints are in another format.
    """
    with _naming(path):
        values = _object(path)
        found = values.pop("format", 1)
        if found != FORMAT:
            raise ValueError(
                f"its run is in format {found}, which only the version that wrote it can "
                f"resume; lsgd_jax {lj.__version__} resumes format {FORMAT}"
            )
        values.pop("distributed", None)  # 0.2.0 wrote it
        given = flat(values)
        for name in ("name", "model", "method.name"):
            if name not in given:
                raise ValueError(f"{name} is missing")
        # Runs of earlier versions have no fingerprints in their checkpoints.
        if hasattr(methods.find(str(given["method.name"])), "verify"):
            given.setdefault("method.verify", False)
        return _built(_restored(given))


def read_some(path: os.PathLike) -> dict[str, Any]:
    """Reads settings, by their full names, from a JSON file that may lack some.

    config.json of a run is such a file. It does not say where another run shall be, so the
    run folder is left out, and so is the rendezvous.

    Raises:
      ValueError: the file cannot be read or holds no JSON object.
    """
    with _naming(path):
        values = _object(path)
        if values.pop("format", None) is not None:
            for name in ("distributed", "run_dir", "resume"):
                values.pop(name, None)
        if isinstance(values.get("method"), str):  # as on the command line
            values["method"] = {"name": values["method"]}
        return flat(values)


def _object(path: os.PathLike) -> dict[str, Any]:
    raw = pathlib.Path(path).read_bytes()
    text = raw.decode(json.detect_encoding(raw))  # some editors begin with a BOM
    try:
        values = json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        raise ValueError(_no_json(text, error)) from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} is given twice")
    return values


def _no_json(text: str, error: json.JSONDecodeError) -> str:
    """Says why a text is no JSON.

    >>> text = '{"steps": 3, // few'
    >>> try: json.loads(text)
    ... except ValueError as error: _no_json(text, error)
    'line 1, column 14: JSON has no comments'
    """
    rest = text[error.pos :]
    where = f"line {error.lineno}, column {error.colno}"
    if rest.startswith(("#", "//", "/*")):
        return f"{where}: JSON has no comments"
    if not rest.strip() or error.msg.startswith("Unterminated"):
        return f"line {error.lineno} is no JSON; is the file cut off?"
    if not text.lstrip().startswith(("{", "[")):
        return "it is no JSON, which begins with {"
    return f"{where} is no JSON: {error.msg}"


@contextlib.contextmanager
def _naming(path: os.PathLike) -> Generator[None]:
    """Names the file in errors."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except RecursionError:
        reason = "its values are nested too deep"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def _restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, the method among them, as they were before JSON, which has no tuples.

    Raises:
      ValueError: a setting, which it names, is unknown or of a wrong type.
    """
    restored: dict[str, Any] = {}
    method = methods.find(str(values["method.name"]))
    known = SETTINGS | dict(settings_of(method, "method."))
    known["method.name"] = Setting(str, None, ())
    for name, value in values.items():
        if name in REMOVED and value == REMOVED[name]:
            continue
        if name in REMOVED and name not in known:
            raise ValueError(
                f"lsgd_jax 0.3 is the last one with `{name}`, which must be "
                f"{REMOVED[name]!r} now, got {name}={json.dumps(value)}"
            )
        if name not in known:
            raise ValueError(f"there is no setting {name}{suggestion(name, [*known])}")
        value = tuple(value) if isinstance(value, list) else value
        hint = known[name].hint
        if not _is_of(hint, value):
            kind = hint.__name__ if isinstance(hint, type) else str(hint)
            kind = kind.replace("typing.", "")
            got = json.dumps(value)
            raise ValueError(f"`{name}` must be of type {kind}, got {name}={got}")
        restored[name] = _expanded(value) if PATH in known[name].notes else value
    return restored


def _expanded(path: Any) -> Any:
    """Paths with the home folder in place of ~, which a shell leaves in --option=~/x.

    >>> _expanded(("~/x", "y/~"))[1], _expanded(None)
    ('y/~', None)
    """
    if isinstance(path, tuple):
        return tuple(map(os.path.expanduser, path))
    return None if path is None else os.path.expanduser(path)


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value is of the type of a setting.

    >>> _is_of(float | None, 3), _is_of(tuple[int, ...], (1, "2")), _is_of(int, True)
    (True, False, False)
    """
    parts = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return value in parts
        case typing.Union | types.UnionType:
            return any(_is_of(part, value) for part in parts)
        case origin if origin is tuple and isinstance(value, tuple):
            each = parts[:1] * len(value) if parts[-1] is ... else parts
            return len(value) == len(each) and all(map(_is_of, each, value))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
