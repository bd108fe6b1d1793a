"""python -m train.export RUN OUT: exports a trained model.

OUT is a new folder. It receives `model.safetensors` with the parameters and batch
statistics, and `model.json`, which describes the model. A model of translation also leaves
its subwords there, as `sentencepiece.model`.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from flax.traverse_util import flatten_dict

import lsgd_jax as lj
from train.config.schema import fields
from train.data.text import Vocabulary
from train.data.translation import Subwords
from train.process import command
from train.process.exit_status import SUCCESS
from train.process.messages import check_installed
from train.run import cli
from train.run.loading import Loaded, Which, load
from train.task import datasets


def export(
    run: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="RUN")],
    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT")],
    which: Which | int = "best",
    model: Literal["center", "best-worker"] = "center",
) -> None:
    """Exports a model of a run to a new folder.

    Args:
      run: the run folder.
      out: the folder to create.
      which: the checkpoint with the best test, the last one, or that of a step.
      model: the center, or the worker with the lowest recent losses.

    Raises:
      ValueError: the run cannot be loaded, or the folder exists.
      OSError: the files cannot be written. The folder is removed then.
    """
    check_installed("the export", "export", "safetensors")
    from safetensors.numpy import save

    loaded = load(run, which, worker=None if model == "center" else "best")
    text = json.dumps(description(loaded), indent=2) + "\n"
    tensors = flatten_dict(loaded.variables, sep=".")
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"`out` must be a new folder, but {out} exists") from None
    try:
        # A file of `save_file` could be read by its owner only, whatever the umask.
        whole = save({name: np.ascontiguousarray(x) for name, x in tensors.items()})
        (out / "model.safetensors").write_bytes(whole)
        (out / "model.json").write_text(text)
        if isinstance(loaded.vocabulary, Subwords):
            (out / "sentencepiece.model").write_bytes(loaded.vocabulary.model)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def description(loaded: Loaded) -> dict[str, Any]:
    """A description of a model, as JSON represents it."""
    model = loaded.model
    vocabulary = loaded.vocabulary
    names = {field.name for field in dataclasses.fields(model)} - {"parent", "name"}
    return {
        "lsgd_jax": lj.__version__,
        "run": loaded.config.name,
        "step": loaded.step,
        "tested": loaded.tested,
        "network": f"{type(model).__module__}.{type(model).__name__}",
        "arguments": {name: getattr(model, name) for name in sorted(names)},
        "input": _tokens(loaded) if vocabulary is not None else _pixels(loaded),
        "outputs": loaded.outputs,
        "classes": loaded.classes,
        "characters": vocabulary.characters if isinstance(vocabulary, Vocabulary) else None,
        "configuration": fields(loaded.config),
    }


def _tokens(loaded: Loaded) -> dict[str, Any]:
    data = loaded.config.data
    tokens = data.tokens if data.name == "text" else "subwords"
    return {"tokens": tokens, "shape": [data.context], "dtype": "int32"}


def _pixels(loaded: Loaded) -> dict[str, Any]:
    """The shape of an input, and the inputs of a black and of a white pixel.

    Arrays have the shape alone: those of uint8 are scaled to [-1, 1].
    """
    if loaded.shape is not None:
        return {"shape": list(loaded.shape), "dtype": "float32"}
    shape = (1, *datasets.image_shape(loaded.config))
    test = datasets.transforms_of(loaded.config).test
    black, white = (np.asarray(test(jnp.full(shape, x, jnp.uint8)))[0] for x in (0, 255))
    colors = {"black": black[0, 0].tolist(), "white": white[0, 0].tolist()}
    return {"shape": list(black.shape), "dtype": "float32", **colors}


@command.with_status
def main(arguments: Sequence[str]) -> int:
    """Exports a model. Returns the exit status: 0, 1 (not written) or 2 (wrong usage)."""
    cli.run(export, arguments, "python -m train.export", description=__doc__)
    return SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main))
