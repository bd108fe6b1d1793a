"""The options of the transformer."""

import dataclasses
from typing import Literal

import lsgd_jax as lj


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The network `transformer`, which predicts the next token of a text."""

    # Number of blocks, each an attention and a perceptron.
    layers: int = 4
    # Attention heads of each block; must divide the width.
    heads: int = 4
    # Size of the vectors that stand for tokens.
    width: int = 128
    # How it knows where a token stands: vectors are rotated by their position, or one that
    # is learned for each position is added.
    positions: Literal["rotary", "learned"] = "rotary"
    # What it computes in; parameters, logits and the loss are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        for name in ("layers", "heads", "width"):
            lj.checks.check_positive_int(f"transformer.{name}", getattr(self, name))
        if self.width % (2 * self.heads):
            raise ValueError(
                "`transformer.width` must be divisible by twice the heads, got "
                f"transformer.width={self.width}, transformer.heads={self.heads}"
            )
