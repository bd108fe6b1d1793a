"""python -m train.sample RUN --prompt "def ": continues or translates a text.

It prints the prompt and its continuation by a trained model. RUN is the folder of a run on
text. For a run on translation it prints the translation of each line of the prompt.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro

import lsgd_jax as lj
from train.config.schema import SEED
from train.data.translation import Subwords
from train.metrics.progress import printable
from train.process import command
from train.process.exit_status import SUCCESS
from train.run import cli
from train.run.loading import Which, load
from train.task.text import SAMPLE_TOKENS, TEMPERATURE, written


def sample(
    run: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="RUN")],
    prompt: str = "",
    length: int = SAMPLE_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    beam: int | None = None,
    which: Which | int = "best",
) -> str:
    """Returns a prompt and its continuation, or a translation, by the center of a run.

    Args:
      run: the run folder.
      prompt: the text to continue or to translate. Defaults to the beginning of a line.
      length: number of tokens to draw (text).
      temperature: divides the logits; below 1, likely tokens become more likely (text).
      seed: seed of the draws (text).
      beam: candidates of a beam search. Defaults to 1, which is greedy (translation).
      which: the checkpoint with the best test, the last one, or that of a step.

    Raises:
      ValueError: the run cannot be loaded or is a run on images, or an option is wrong.
    """
    lj.checks.check_positive_int("length", length)
    for name, count in {"length": length, "beam": beam or 1}.items():
        if count >= 2**31:
            raise ValueError(f"`{name}` must be less than 2**31, got {name}={count}")
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature=}")
    if not SEED.holds(seed):
        raise ValueError(f"`seed` must be {SEED.text}, got {seed=}")
    loaded = load(run, which)
    if loaded.vocabulary is None:
        raise ValueError(f"{run} is a run on images; only runs on text can be sampled")
    if isinstance(loaded.vocabulary, Subwords):
        if (length, temperature, seed) != (SAMPLE_TOKENS, TEMPERATURE, 0):
            raise ValueError("`length`, `temperature` and `seed` are for runs on text only")
        return "\n".join(loaded.translate(prompt.splitlines(), 1 if beam is None else beam))
    if beam is not None:
        raise ValueError(f"`beam` is for runs on translation only, got {beam=}")
    network = (loaded.model, loaded.variables, loaded.vocabulary)
    key = jax.random.key(seed)
    return prompt + written(*network, prompt, length, key, temperature)


@command.with_status
def main(arguments: Sequence[str]) -> int:
    """Prints a sample. Returns the exit status: 0 or 2 (wrong usage)."""
    text = cli.run(sample, arguments, "python -m train.sample", description=__doc__)
    print(printable(text, sys.stdout.encoding) if sys.stdout.isatty() else text)
    return SUCCESS


if __name__ == "__main__":
    sys.exit(command.run(main))
