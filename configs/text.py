"""A small transformer on the characters of a text, 4 workers.

- Command: python -m train text --data.files FILE...
  (without files: the source of Python's own standard library)
- Hardware: 2 CPU cores (4 emulated devices)
- Time: about 5 minutes of CPU time per worker
- Expected: on the characters of tiny Shakespeare one worker by itself (--workers.locals 1
  --method independent) ends at 1.81 nats; 1.88 is what is usually reported

4 layers and heads of width 128 and a context of 64, AdamW with warm-up and cosine: the
settings that are widely used for a first model of tiny Shakespeare on a CPU.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig
from train.task import methods


CONFIG = Config(
    name="text",
    model="transformer",
    data=DataConfig(name="text"),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=1e-3,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        decay_of="matrices",
        clip=1.0,
        schedule="cosine",
        warmup_steps=100,
        final_fraction=0.1,
    ),
    method=methods.make(
        "lsgd", local_pull=0.5, global_pull=0.0, local_period=16, global_period=32
    ),
    steps=2000,
    batch_size=12,
    log_every=50,
    test_every=250,
    checkpoint_every=500,
)
