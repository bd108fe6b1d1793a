"""python -m paper NAME [--options]: an experiment of the paper. See NAME --help."""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from train.process import command
from train.process.messages import meant
from train.process.names import summary


# The first line of a module's docstring describes it in --help. Exact experiments define
# OPTIONS, the class of their options, and run(options) -> Results; the others define
# main(arguments) -> int.
EXPERIMENTS = {
    "sinc": "paper.sinc",
    "matrix-completion": "paper.matrix_completion",
    "theory": "paper.theory",
    "cifar10": "paper.cifar10",
    "landscape": "paper.landscape.cli",
}


def main(arguments: list[str]) -> int:
    """Runs an experiment and returns the exit status.

    It is 0, 1 (nothing written, or a claim fails), 2 (wrong usage) or 130 (interrupted).
    """
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(f"{__doc__}\n")
        for name, module in EXPERIMENTS.items():
            found = importlib.util.find_spec(module)
            assert found is not None and found.origin is not None
            print(f"  {name:<20}{summary(pathlib.Path(found.origin))}")
        return 0
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        rule = f"the experiment must be one of {known}"
        near = meant(name, EXPERIMENTS)
        print(f"error: {rule}, got {name!r}{near}", file=sys.stderr)
        return 2
    from train.process import compilation_cache  # imports jax, which takes seconds

    try:
        compilation_cache.use()
        return run(name, arguments[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the results cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs an experiment; an exact one in float64, and writes its results."""
    # These take seconds, which --help and a typo can do without.
    import jax

    from paper import output
    from train.cluster import devices
    from train.run import cli

    module = importlib.import_module(EXPERIMENTS[name])
    try:
        if hasattr(module, "main"):
            return module.main(arguments)
        program = f"python -m paper {name}"
        options = cli.run(module.OPTIONS, arguments, program, description=module.__doc__)
        out = output.new_folder(options.out, name)
        with jax.enable_x64(True):
            results = module.run(options)
    except (AssertionError, RuntimeError):
        devices.check_platforms()  # jax's own errors do not name the cause
        raise
    results.write(out)
    print(f"{results.summary}everything is in {out}")
    return 0 if results.holds else 1


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
