"""The config: its schema, how it is loaded, and what is checked before anything is compiled."""

from megajax.config.load import help_text, load_config
from megajax.config.schema import (
    AXES,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DataSource,
    KernelsConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    RopeScaling,
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
    "KernelsConfig",
    "LoggingConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RematConfig",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "help_text",
    "load_config",
]
