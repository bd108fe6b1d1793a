"""python -m paper NAME [--options]: an experiment of the paper. See NAME --help."""

import importlib
import sys

from train import command, compilation_cache
from train.cluster import devices


# Each module has a docstring whose first line says what it is, and main(arguments) -> int.
EXPERIMENTS = {
    "sinc": "paper.sinc",
    "matrix-completion": "paper.matrix_completion",
    "theory": "paper.theory",
    "cifar10": "paper.cifar10",
    "landscape": "paper.landscape.cli",
}


def main(arguments: list[str]) -> int:
    """Runs an experiment; the status is 0, 1 (something fails to hold), 2 (usage), 130."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(f"{__doc__}\n")
        for name, module in EXPERIMENTS.items():
            summary = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
            print(f"  {name:<20}{summary}")
        return 0
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        rule = f"the experiment must be one of {known}"
        print(f"error: {rule}, got {name!r}", file=sys.stderr)
        return 2
    try:
        compilation_cache.use()
        return _run(EXPERIMENTS[name], arguments[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(module: str, arguments: list[str]) -> int:
    try:
        return importlib.import_module(module).main(arguments)
    except (AssertionError, RuntimeError):
        devices.check_platforms()  # jax's own errors do not say that this is why
        raise


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
