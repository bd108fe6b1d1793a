"""Texts of messages: errors in one line, missing packages, suggestions, how to resume."""

import difflib
import importlib.util
import pathlib
import re
from collections.abc import Iterable


NOTHING_LOST = "nothing was lost: the same command starts the run again"


def one_line(error: Exception | str, longest: int = 200) -> str:
    """The message of an error in one line, shortened in the middle if it is long.

    Args:
      error: the error, or its message.
      longest: number of characters above which it is shortened.

    >>> one_line(ValueError("RESOURCE_EXHAUSTED: no space [os_error_code='28']"))
    'RESOURCE_EXHAUSTED: no space'
    """
    line = " ".join(str(error).split()) or repr(error)
    line = re.sub(r" \[(os_error_code|tensorstore_spec|source locations).*", "", line)
    half = longest // 2
    return line if len(line) <= longest else f"{line[:half]} … {line[-half:]}"


def plain(text: str) -> str:
    """The text in one line, with escapes for characters that a terminal obeys.

    Messages name files, and a name may hold such characters.

    >>> print(plain("é\\x1b[2J\\nwarning.jpeg"))
    é\\x1b[2J\\nwarning.jpeg
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(count: int, noun: str) -> str:
    """A number of things, with a plural in s.

    >>> counted(1, "step"), counted(2, "image")
    ('1 step', '2 images')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Raises ValueError if a package is not installed.

    Args:
      what: the subject of the message, such as "the export".
      extra: the extra of lsgd_jax that installs them.
      packages: names of modules.
    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise ValueError(
            f"{what} needs {missing[0]}, which is not installed: "
            f'pip install -e ".[{extra}]" in a checkout of lsgd_jax'
        )


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    return importlib.util.find_spec(package) is not None


def meant(given: str, names: Iterable[str], prefix: str = "") -> str:
    """A suggestion for an unknown word, or '' if no known word is near.

    >>> meant("perid", ["period", "wire"], "--method.")
    '; did you mean --method.period?'
    """
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.65)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def suggestion(given: str, names: list[str]) -> str:
    """A suggestion for an unknown option or setting, or '' if none is near.

    >>> suggestion("--momentum", ["--momentary", "--optimizer.momentum"])
    '; did you mean --optimizer.momentum?'
    >>> suggestion("--method.wire", ["--method", "--method.until"])
    ''
    """
    same = {f"{given}.name", given.removesuffix(".name")}
    same |= {name for name in names if name.endswith(f".{given.lstrip('-')}")}
    same = sorted(same.intersection(names))
    if same:
        return f"; did you mean {same[0]}?"
    group = given[: given.rfind(".") + 1]
    siblings = [name.removeprefix(group) for name in names if name.startswith(group)]
    if not siblings:
        group = ""
        siblings = names
    return meant(given.removeprefix(group), siblings, group)


def to_resume(command: str, config_file: pathlib.Path, when: str = "to resume") -> str:
    """Names the command that resumes a run, or says that its folder is gone.

    Args:
      command: the command.
      config_file: config.json in the run folder.
      when: what the command is for.
    """
    if not config_file.exists():
        folder = config_file.parent
        return f"{folder} is gone (deleted, moved or not mounted): nothing can be resumed"
    return f"{when}: {command}"
