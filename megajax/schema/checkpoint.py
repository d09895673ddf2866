"""The keys of the section `checkpoint`."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from megajax.options.fp8_recipes import RECIPES
from megajax.options.quantisations import QUANTISATIONS
from megajax.schema.fields import Count, Section, Text
from megajax.schema.rules import Below, Excludes, MultipleOf, Needs, ReadIf

TensorFormat = Literal["float32", "bfloat16", "float16"]
DTYPES = get_args(TensorFormat)


class ExportConfig(Section):
    """Folders in Hugging Face's format, written from checkpoints while training continues."""

    dir: Text | None = Field(default=None, description="Directory of the folders, step-STEP each; null: none.")
    every: Annotated[
        Count | None,
        ReadIf("dir"),
        MultipleOf("run.checkpoint_interval"),
    ] = Field(
        default=None,
        description="Steps between folders, a multiple of run.checkpoint_interval; null: one for each checkpoint at a"
        " multiple of it. The last step always gets one.",
    )
    dtype: Annotated[TensorFormat, ReadIf("dir")] = Field(default="float32", description="Format of the tensors.")
    quantization: Annotated[
        str,
        QUANTISATIONS,
        ReadIf("dir"),
        Needs(
            "precision.fp8.recipe",
            lambda recipe: RECIPES[recipe].keeps_history,
            of=lambda name: QUANTISATIONS[name].needs_history,
            what="the inputs' largest magnitudes",
            cure="set precision.fp8.recipe=delayed, or checkpoint.export_hf.quantization=fp8_channel",
        ),
    ] = Field(
        default="none",
        description="Format of the linear layers' matrices. fp8_block: DeepSeek's, scales of 128 x 128; fp8_channel:"
        " compressed-tensors', a scale for each row; fp8_tensor: one, with the inputs' scales of delayed FP8; mxfp4:"
        " GPT-OSS's experts.",
    )


class CheckpointConfig(Section):
    """Which checkpoints are kept, and where the initial weights come from."""

    dir: Text | None = Field(
        default=None,
        description="Directory, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER of the run's checkpoints, of no other run;"
        " null: checkpoints in run.dir, which otherwise leads to it.",
    )
    keep: Count = Field(default=2, description="Number of newest checkpoints to keep.")
    keep_every: Count | None = Field(default=None, description="Also keep every checkpoint at a multiple of this step.")
    keep_best: Annotated[Count | None, Needs("run.eval_steps", bool, what="evaluations")] = Field(
        default=None, description="Also keep this number of the best checkpoints, by evaluations on data.valid."
    )
    best_by: Annotated[Text, ReadIf("keep_best")] = Field(
        default="lowest eval_loss",
        description="Which are the best: lowest or highest, and a name that evaluations have in metrics.jsonl, such as"
        " highest eval_accuracy.",
    )
    save_optimizer: bool = Field(
        default=True,
        description="false: checkpoints have no optimizer state; they are a third of the size, and no run resumes from"
        " them.",
    )
    init_from: Text | None = Field(
        default=None,
        description="Run directory, checkpoint, Hugging Face folder, or Megatron-Core checkpoint with the"
        " initial weights.",
    )
    init_state: Annotated[Literal["weights", "position", "all"], ReadIf("init_from")] = Field(
        default="weights",
        description="What a run takes of a Megatron-Core checkpoint in init_from: weights; position: also its step and"
        " its position in the data; all: also the optimizer's master weights and moments, so its training goes on.",
    )
    upcycle: Annotated[
        bool,
        Needs("init_from", what="the weights of a dense model"),
        Needs("model.num_experts", what="experts"),
        Excludes(
            "model.shared_expert_ffn_hidden_size",
            because="a dense model has no weights of a shared expert",
            cure="set model.shared_expert_ffn_hidden_size=0",
        ),
        Excludes(
            "init_state",
            "all",
            because="the optimizer's state is that of the dense model",
            cure="set checkpoint.init_state=position",
        ),
        Excludes("lora.rank", because="LoRA would freeze the routers, which are new", cure="remove lora.rank"),
    ] = Field(
        default=False,
        description="init_from is a dense model: each expert begins as a copy of its layer's MLP, routers begin random"
        " (Sparse Upcycling).",
    )
    resume_step: Count | None = Field(
        default=None, description="Go back to the checkpoint of this step, once; null: resume from the newest."
    )
    local_dir: Annotated[
        Text | None,
        Needs("local_interval", cure="set checkpoint.local_interval to a number of steps"),
        Excludes("save_optimizer", False, because="it is to resume from"),
    ] = Field(
        default=None,
        description="Directory on each host, such as /dev/shm/megajax or one on its NVMe disk, for frequent checkpoints"
        " from which the same processes restart; null: none.",
    )
    local_interval: Annotated[
        Count | None,
        ReadIf("local_dir"),
        Below("run.checkpoint_interval", cure="use a smaller interval, or remove checkpoint.local_dir"),
    ] = Field(default=None, description="Steps between checkpoints in local_dir.")
    allow_changes: tuple[Text, ...] = Field(
        default=(),
        strict=False,
        description="Keys or sections, such as data.train or data, that may differ from the checkpoint of a resumed run"
        " though they change its numbers; of model, such as model.rope_scaling, also from the weights of init_from.",
    )
    export_hf: ExportConfig = Field(
        default_factory=ExportConfig, description="Folders in Hugging Face's format, written while training continues."
    )
