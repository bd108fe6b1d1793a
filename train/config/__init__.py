"""The settings of a run, and the file that keeps them."""

from train.config.schema import Config as Config
from train.config.schema import DataConfig as DataConfig
from train.config.schema import DistributedConfig as DistributedConfig
from train.config.schema import OptimizerConfig as OptimizerConfig
from train.config.schema import RayConfig as RayConfig
from train.config.schema import TransformerConfig as TransformerConfig
from train.config.schema import WorkersConfig as WorkersConfig
