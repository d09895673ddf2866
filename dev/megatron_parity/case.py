"""A case: one model for both programs, and how it is trained."""

from dataclasses import dataclass, field
from typing import Any

ROPE = {"position_embedding_type": "rope", "rotary_base": 10000, "share_embeddings_and_output_weights": False}


@dataclass(frozen=True)
class Rate:
    """The learning rate's schedule."""

    kind: str = "cosine"
    highest: float = 1e-2
    lowest: float = 1e-3
    warmup: int = 5
    decay: int = 40
    tail: int | None = None  # of WSD: steps and style of its decay
    style: str | None = None


@dataclass(frozen=True)
class Case:
    """Settings of both programs. A case with a `row` must differ, and that row of docs/migration.md says why."""

    model: dict[str, Any]  # megajax's section `model`
    config: dict[str, Any]  # arguments of Megatron's TransformerConfig, or of MLATransformerConfig
    gpt: dict[str, Any] = field(default_factory=lambda: ROPE)  # arguments of Megatron's GPTModel
    row: str = ""
    sections: dict[str, Any] = field(default_factory=dict)  # other sections of megajax's config
    steps: int = 40
    batch: int = 8  # sequences of a step
    micro: int = 2  # sequences of a microbatch of one rank
    length: int = 32  # tokens of a sequence
    vocab: int = 128
    padded: int | None = None  # Megatron's vocabulary, if it is larger
    mask: str = ""  # see batches.py
    per_token: bool = True  # --calculate-per-token-loss
    rate: Rate = Rate()
    aligned: bool = True  # Megatron's schedule begins one step later; here it is moved unless a case is about that
    ranks: int = 1  # data-parallel ranks of Megatron
    devices: int = 1  # of megajax, on mesh.data
    distributed_optimizer: bool = False
    patches: tuple[str, ...] = ()  # formulas of Megatron that are replaced, see megatron_model.py

    @property
    def microbatches(self) -> int:
        """Their number in a step of megajax."""
        return self.batch // self.micro // self.devices

    @property
    def optimizer(self) -> dict[str, Any]:
        """megajax's section."""
        own = {"kind": "adamw", "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
        return own | self.sections.get("optimizer", {})
