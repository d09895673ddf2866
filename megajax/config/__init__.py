"""The config: its schema, its loading, and the checks before anything is compiled."""

from megajax.config.data_schema import DataConfig, DataSource
from megajax.config.fields import AXES
from megajax.config.fp8_recipes import Fp8Recipe, register_fp8
from megajax.config.hooks import register_hook
from megajax.config.load import help_text, load_config
from megajax.config.lora_schema import LoraConfig
from megajax.config.model_schema import ModelConfig, RopeScaling, RouterConfig
from megajax.config.remat import Keep, RematPolicy, register_remat
from megajax.config.schedules import LearningRateSchedule, register_schedule
from megajax.config.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    KernelsConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    RunConfig,
    ScheduleConfig,
)

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
    "register_fp8",
    "LearningRateSchedule",
    "register_hook",
    "register_remat",
    "register_schedule",
]
