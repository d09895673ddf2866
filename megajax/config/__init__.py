"""The config: its schema, its loading, and the checks before anything is compiled."""

from megajax.config.load import help_text, load_config
from megajax.options.data_kinds import register_data
from megajax.options.fp8_recipes import Fp8Recipe, register_fp8
from megajax.options.registered import register_hook
from megajax.options.remat import Keep, RematPolicy, register_remat
from megajax.options.schedules import LearningRateSchedule, register_schedule
from megajax.schema.checkpoint import CheckpointConfig
from megajax.schema.config import (
    BatchConfig,
    Config,
    KernelsConfig,
    LoggingConfig,
    MeshConfig,
    PipelineConfig,
    RematConfig,
)
from megajax.schema.data import DataConfig, DataSource
from megajax.schema.fields import AXES
from megajax.schema.layer_sections import RopeScaling, RouterConfig
from megajax.schema.lora import LoraConfig
from megajax.schema.model import ModelConfig
from megajax.schema.optimizer import OptimizerConfig
from megajax.schema.precision import PrecisionConfig
from megajax.schema.run import RunConfig
from megajax.schema.schedule import ScheduleConfig

__all__ = [
    "AXES",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "Keep",
    "KernelsConfig",
    "LoggingConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RematConfig",
    "RematPolicy",
    "RopeScaling",
    "RouterConfig",
    "RunConfig",
    "ScheduleConfig",
    "help_text",
    "load_config",
    "Fp8Recipe",
    "register_data",
    "register_fp8",
    "LearningRateSchedule",
    "register_hook",
    "register_remat",
    "register_schedule",
]
