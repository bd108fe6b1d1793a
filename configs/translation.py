"""A small encoder and decoder that translate sentences, 4 workers.

- Command: python -m train translation --data.source FILE... --data.target FILE...
- Hardware: 2 CPU cores (4 emulated devices)
- Time: about 50 s of CPU time in all
- Expected: 3.9 BLEU after 800 steps of all-reduce (docs/results/text.md, Translation)

Label smoothing, the shared embedding and the learning rate, which falls with the inverse
square root of the step, are those of Vaswani et al., Attention is all you need, NeurIPS
2017, and of SGP's experiment on WMT'16 (Assran et al., ICML 2019). The network is smaller
by far.
"""

from train.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    TransformerConfig,
    WorkersConfig,
    methods,
)


CONFIG = Config(
    name="translation",
    model="encoder-decoder",
    data=DataConfig(name="translation", context=32),
    transformer=TransformerConfig(layers=2, heads=4, width=64),
    workers=WorkersConfig(nodes=1, locals=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=3e-3,
        betas=(0.9, 0.98),
        clip=1.0,
        schedule="inverse-sqrt",
        warmup_steps=100,
    ),
    method=methods.make("sgp"),
    label_smoothing=0.1,
    steps=240,
    batch_size=16,
    log_every=20,
    test_every=60,
    checkpoint_every=120,
)
