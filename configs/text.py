"""A small transformer on the characters of a text, 4 workers.

- Command: python -m train text --data.files FILE...
  (without files: the source of Python's own standard library)
- Hardware: 2 CPU cores (4 emulated devices)
- Time: about 5 minutes of CPU time per worker
- Expected: on the characters of tiny Shakespeare, a single worker (--workers.locals 1
  --method independent) reaches 1.81 nats; 1.88 is usually reported

The settings are widely used for a first model of tiny Shakespeare on a CPU: 4 layers, 4
heads, width 128, context 64, AdamW with warm-up and cosine.
"""

from train.config import Config, DataConfig, OptimizerConfig, WorkersConfig, methods


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
