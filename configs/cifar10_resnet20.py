"""Leader SGD on CIFAR-10 with ResNet20, 4 workers and one leader.

- Command: python -m train cifar10-resnet20 --data.dir DIR
  (DIR: the official folder cifar-10-batches-bin)
- Paper: LSGD with 4 workers ends at 9.1 % test error (best 9.0 %)

Settings of Teng et al., NeurIPS 2019: batch 128 per worker, learning rate 0.1 without
momentum, divided by 10 late in training, weight decay 1e-4, pull 0.1 every 64 steps.
"""

import dataclasses

from train.config import OptimizerConfig

from . import cifar10_cnn7


CONFIG = dataclasses.replace(
    cifar10_cnn7.CONFIG,
    name="cifar10-resnet20",
    model="resnet20",
    optimizer=OptimizerConfig(
        learning_rate=0.1, weight_decay=1e-4, schedule="drops", drop_at=(15_000,)
    ),
)
