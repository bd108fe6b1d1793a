"""Leader SGD on ImageNet with ResNet-50, 4 workers and one leader.

- Command: python -m train imagenet-resnet50 --data.dir DIR
  (DIR: train/CLASS/*.JPEG and val/CLASS/*.JPEG, a folder per class)
- Hardware: 4 GPUs, one worker each, and CPU cores to decode images (2 ms an image)
- Time: not measured
- Paper: LSGD with 4 workers ends at 25.7 % top-1 error on the validation images

Settings of Teng et al., NeurIPS 2019: batch 128 per worker, learning rate 0.1 without
momentum, weight decay 1e-4, pull 0.1 every 64 steps. With 4 workers there is one leader.
Every worker draws from all images. In 225,000 steps the workers see 90 epochs in total.
The learning rate is constant.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


CONFIG = Config(
    name="imagenet-resnet50",
    model="resnet50",
    data=DataConfig(name="imagenet", crop=224),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-4),
    method=methods.make(
        "lsgd", local_pull=0.1, global_pull=0.0, local_period=64, global_period=128
    ),
    steps=225_000,
    batch_size=128,
    log_every=64,
    test_every=5000,
    checkpoint_every=2500,
)
