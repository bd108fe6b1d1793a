"""A network that compiles fast, for tests of what surrounds it."""

import flax.linen as nn


class Tiny(nn.Module):
    """One layer, in place of any other network."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))
