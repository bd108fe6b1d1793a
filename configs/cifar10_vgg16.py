"""Leader SGD on CIFAR-10 with VGG16 and batch normalization, 4 workers and one leader.

- Command: python -m train cifar10-vgg16 --data.dir DIR
  (DIR: the official folder cifar-10-batches-bin)
- Paper: LSGD with 4 workers ends at 9.9 % test error (best 9.8 %)

Settings of Teng et al., NeurIPS 2019: batch 128 per worker, learning rate 0.1 without
momentum, divided by 10 late in training, weight decay 1e-4, pull 0.1 every 64 steps. The
network needs 32 x 32 images, which are padded by 4 pixels before the random crop.
"""

import dataclasses

from train.config import DataConfig

from . import cifar10_resnet20


CONFIG = dataclasses.replace(
    cifar10_resnet20.CONFIG,
    name="cifar10-vgg16",
    model="vgg16",
    data=DataConfig(name="cifar10", crop=32, padding=4),
)
