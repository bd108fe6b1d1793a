"""Leader SGD on scikit-learn's handwritten digits, 2 nodes x 4 workers.

- Command: python -m train digits
- Hardware: 2 CPU cores (8 emulated devices)
- Time: about 10 s of training
- Expected: test error of the center of 0.3 to 1.1 % (three seeds)
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


CONFIG = Config(
    name="digits",
    model="digits-cnn",
    data=DataConfig(name="digits"),
    workers=WorkersConfig(nodes=2, locals=4),
    optimizer=OptimizerConfig(learning_rate=0.05, momentum=0.9, nesterov=True),
    method=methods.make(
        "lsgd", local_pull=0.1, global_pull=0.1, local_period=8, global_period=32
    ),
    steps=120,
    batch_size=32,
    test_every=10,
    checkpoint_every=40,
)
