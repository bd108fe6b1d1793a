"""Networks as Flax linen modules. Those for images: [B, H, W, C] -> logits [B, classes]."""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from train.config.schema import Config
from train.task.layers import BatchNorm, conv_general_dilated
from train.task.transformer import EncoderDecoder, Transformer


def max_pool_2x2(x: Array) -> Array:
    """The maximum over 2 x 2 patches: [B, H, W, C] -> [B, H // 2, W // 2, C].

    On CPUs the backward pass of a maximum over a reshaped array is much faster than that
    of `nn.max_pool`, a select-and-scatter.

    >>> max_pool_2x2(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class MLP(nn.Module):
    """A perceptron with two hidden layers, for inputs of any shape [B, ...]."""

    num_classes: int = 10
    takes_any_shape: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        del train
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(self.num_classes)(x)


class DigitsCNN(nn.Module):
    """A small CNN for 8 x 8 images."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = max_pool_2x2(x).reshape(x.shape[0], -1)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(self.num_classes)(x)


class DigitsBatchNormCNN(nn.Module):
    """A small CNN with batch normalization for 8 x 8 images."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(BatchNorm(use_running_average=not train)(x))
        x = max_pool_2x2(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(self.num_classes)(x)


class CNN7(nn.Module):
    """The 7-layer CNN of LSGD's CIFAR-10 experiments, for 28 x 28 crops.

    It has 351,946 parameters and no nonlinearity after the 256 units.

    Source: Teng et al., NeurIPS 2019, released code.
    """

    num_classes: int = 10
    image_size: ClassVar[int] = 28

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(
            nn.Conv, padding="VALID", conv_general_dilated=conv_general_dilated
        )
        x = max_pool_2x2(nn.relu(conv(64, (5, 5))(x)))
        x = max_pool_2x2(nn.relu(conv(128, (5, 5))(x)))
        x = nn.relu(conv(64, (3, 3))(x))
        x = nn.Dense(256)(x.reshape(x.shape[0], -1))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters (option A).

    If the block halves the image, the shortcut takes every other pixel and pads the
    channels with zeros, half of them before and half after the old channels.
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        conv = functools.partial(nn.Conv, self.features, (3, 3), padding=1, use_bias=False)
        norm = functools.partial(BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(conv(strides=self.stride)(x)))
        y = norm()(conv()(y))
        x = x[:, :: self.stride, :: self.stride]
        new = self.features - x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (new // 2, new - new // 2)))
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """The CIFAR ResNet with 20 layers and option-A shortcuts: 269,722 parameters.

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2.
    """

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.Conv(16, (3, 3), padding=1, use_bias=False)(x)
        x = nn.relu(BatchNorm(use_running_average=not train)(x))
        for stage, features in enumerate((16, 32, 64)):
            for block in range(3):
                stride = 2 if stage > 0 and block == 0 else 1
                x = BasicBlock(features, stride)(x, train)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


class VGG16(nn.Module):
    """VGG16 with batch normalization for 32 x 32 images: 15,253,578 parameters.

    Five poolings reduce the image to one pixel. As in LSGD's released code, the head has
    512, 512 and 10 units and two dropouts.

    Source: Simonyan and Zisserman, ICLR 2015, configuration D.
    """

    num_classes: int = 10
    image_size: ClassVar[int] = 32

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for features, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                x = nn.Conv(features, (3, 3), padding=1)(x)
                x = nn.relu(BatchNorm(use_running_average=not train)(x))
            x = max_pool_2x2(x)
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.Dropout(0.5, deterministic=not train)(x)
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(self.num_classes)(x)


STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # (blocks, channels before expansion)
EXPANSION = 4

_conv = functools.partial(
    nn.Conv,
    use_bias=False,
    kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
)
_norm = functools.partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5)


class Bottleneck(nn.Module):
    """x + (1x1, 3x3, 1x1 convolutions of x), each with batch normalization.

    The 3 x 3 convolution has the stride. The scale of the last normalization starts at 0,
    so that the block starts as the identity (Goyal et al., arXiv:1706.02677, section 5.1).
    """

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        norm = functools.partial(_norm, use_running_average=not train)
        out = EXPANSION * self.channels
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(_conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(_conv(self.channels, (3, 3), strides, padding=1)(y)))
        y = norm(scale_init=nn.initializers.zeros)(_conv(out, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(_conv(out, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """The network of LSGD's ImageNet experiment: 25,557,032 parameters for 1,000 classes.

    The 3 x 3 convolutions have the strides, with padding on both sides, as in most
    published results. Images must have at least 32 x 32 pixels.

    Source: He et al., CVPR 2016, table 1.
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


MODELS = {
    "mlp": MLP,
    "digits-cnn": DigitsCNN,
    "digits-bn": DigitsBatchNormCNN,
    "cnn7": CNN7,
    "resnet20": ResNet20,
    "vgg16": VGG16,
    "resnet50": ResNet50,
}
SEQUENCES = {"transformer": Transformer, "encoder-decoder": EncoderDecoder}  # of tokens


def make(config: Config, outputs: int) -> nn.Module:
    """Returns the network of a configuration.

    Args:
      config: the configuration.
      outputs: the number of classes, or of tokens.
    """
    if config.model in SEQUENCES:
        options = dataclasses.asdict(config.transformer)
        return SEQUENCES[config.model](outputs, config.data.context, **options)
    return MODELS[config.model](num_classes=outputs)
