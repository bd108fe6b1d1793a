"""Leader SGD on inputs and labels of your own, from files of NumPy, 4 workers.

- Command: python -m train arrays --data.arrays FILE.npz
  (x_train, y_train, x_test and y_test, or x and y), or
  python -m train arrays --data.arrays inputs.npy labels.npy
- Hardware: 2 CPU cores (4 emulated devices)
- Expected: below 3 % test error with the digits of scikit-learn, 64 numbers each

Inputs have any shape [N, ...]; labels are whole numbers from 0 on. uint8 inputs are scaled
to [-1, 1]; scale all others yourself. Without arrays for testing, a random tenth is held
out. The network is a perceptron; for images [N, H, W, C] take --model resnet20, say.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


CONFIG = Config(
    name="arrays",
    model="mlp",
    data=DataConfig(name="arrays"),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
    method=methods.make(
        "lsgd", local_pull=0.1, global_pull=0.0, local_period=16, global_period=32
    ),
    steps=1000,
    batch_size=32,
    log_every=20,
    test_every=50,
    checkpoint_every=250,
)
