"""Leader SGD on images of your own, in a folder per class, with ResNet20, 4 workers.

- Command: python -m train image-folder --data.dir DIR
  (DIR: train/CLASS/* and val/CLASS/*, a folder per class; JPEG, PNG, BMP, WebP, GIF, TIFF)
- Hardware: GPUs; CPU cores for a few thousand images and --data.crop 32
- Time: not measured

Images of any size are read as in imagenet-resnet50: random crops and flips for training,
and the middle for testing, scaled to --data.crop. For large images take --data.crop 224
--model resnet50.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


CONFIG = Config(
    name="image-folder",
    model="resnet20",
    data=DataConfig(name="imagenet", crop=64),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(
        learning_rate=0.05,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        schedule="cosine",
    ),
    method=methods.make(
        "lsgd", local_pull=0.1, global_pull=0.0, local_period=16, global_period=32
    ),
    steps=2000,
    batch_size=16,
    log_every=20,
    test_every=100,
    checkpoint_every=500,
)
