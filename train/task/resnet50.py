"""ResNet-50, as a Flax linen module: images [B, H, W, 3] -> logits [B, classes]."""

import functools

import flax.linen as nn
from jax import Array


STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # (blocks, channels inside)
EXPANSION = 4

_conv = functools.partial(
    nn.Conv,
    use_bias=False,
    kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
)
_norm = functools.partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5)


class Bottleneck(nn.Module):
    """x + (1x1, 3x3, 1x1 convolutions of x), each with batch normalization.

    A stride is taken by the 3 x 3 convolution. The last normalization starts with scale 0,
    so that the block starts as the identity (Goyal et al., arXiv:1706.02677, section 5.1).
    """

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        norm = functools.partial(_norm, use_running_average=not train)
        out, strides = EXPANSION * self.channels, (self.stride, self.stride)
        y = nn.relu(norm()(_conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(_conv(self.channels, (3, 3), strides, padding=1)(y)))
        y = norm(scale_init=nn.initializers.zeros)(_conv(out, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(_conv(out, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """The network of LSGD's ImageNet experiment: 25,557,032 numbers with 1,000 classes.

    He et al., CVPR 2016, table 1, with the strides at the 3 x 3 convolutions and padding on
    both sides, as in the networks that results are usually compared with. Images of any
    size from 32 x 32 on.
    """

    num_classes: int = 1000

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = _conv(64, (7, 7), (2, 2), padding=3)(x)
        x = nn.relu(_norm(use_running_average=not train)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, (blocks, channels) in enumerate(STAGES):
            for block in range(blocks):
                x = Bottleneck(channels, 2 if stage and not block else 1)(x, train)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
