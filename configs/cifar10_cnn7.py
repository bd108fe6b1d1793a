"""Leader SGD on CIFAR-10 with the paper's 7-layer CNN, 4 workers and one leader.

- Command: python -m train cifar10-cnn7 --data.dir DIR
  (DIR: the official folder cifar-10-batches-bin)
- Paper: LSGD with 4 workers ends at 17.6 % test error (best 17.3 %)

Settings of Teng et al., NeurIPS 2019: batch 128 per worker, learning rate 0.1 without
momentum, weight decay 1e-4, pull 0.1 every 64 steps. With 4 workers there is one leader.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


CONFIG = Config(
    name="cifar10-cnn7",
    model="cnn7",
    data=DataConfig(name="cifar10"),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-4),
    method=methods.make(
        "lsgd", local_pull=0.1, global_pull=0.0, local_period=64, global_period=128
    ),
    steps=20_000,
    batch_size=128,
    log_every=64,
    test_every=390,
    checkpoint_every=1000,
)
