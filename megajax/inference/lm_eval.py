"""megajax's models in lm-eval (the extra `eval`): `python -m megajax.inference.lm_eval run --model megajax ...`.

lm-eval 0.4 has no plug-ins: importing this module registers the model class "megajax", and running it starts lm-eval's
own command line. `--model_args path=RUN_OR_HF_FOLDER,mesh=tensor:2+fsdp:2,dtype=bfloat16`.
"""

import contextlib
import json
from typing import Any

from megajax.console import user_errors
from megajax.errors import InputError
from megajax.extras import loading
from megajax.files import is_number
from megajax.inference.generation import continue_texts
from megajax.inference.load import load_model
from megajax.inference.sampling import Sampling
from megajax.inference.scoring import ScoredWindow, Scorer, windows
from megajax.mesh import named_mesh
from megajax.schema.data import template_arguments

_as_command = __name__ == "__main__"
with user_errors() if _as_command else contextlib.nullcontext(), loading("eval", "megajax.inference.lm_eval"):
    from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found]

MAX_TOKENS = 256  # of an answer, if the task does not say


@register_model("megajax")
class MegajaxLM(TemplateLM):
    """A run or a folder in Hugging Face's format as lm-eval's model."""

    def __init__(
        self,
        path: str,
        mesh: str | None = None,
        dtype: str | None = None,
        speculate: int = 0,
        batch_size: Any = None,
        chat_template_args: str | dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        **_: Any,
    ):
        """`mesh` is written `tensor:2+fsdp:2`, because lm-eval separates arguments by commas and equal signs.

        `batch_size` is the number of prompts that are continued together (default 8). For `speculate` see `load_run`.
        `chat_template_args` and `enable_thinking` are arguments of the chat template, besides those of the training.
        """
        super().__init__()
        sizes = named_mesh(mesh.replace(":", "=").replace("+", ","), "mesh") if mesh else None
        self.model = load_model(path, sizes, dtype, speculate=int(speculate))
        self.scorer = Scorer(self.model)
        text = chat_template_args if isinstance(chat_template_args, str) else json.dumps(chat_template_args or {})
        try:
            given = template_arguments(text)
        except ValueError as error:
            raise InputError(f"chat_template_args={chat_template_args} {error}.") from None
        self.template_arguments = given | ({} if enable_thinking is None else {"enable_thinking": enable_thinking})
        self.batch = int(batch_size) if is_number(str(batch_size)) else 8

    @property
    def eot_token_id(self) -> int:
        token = self.model.stop_tokens[0] if self.model.stop_tokens else self.model.prefix_token
        if token is None:
            raise InputError(
                f"{self.model.folder} has no end-of-text token: set eos_token_id in generation_config.json."
            )
        return token

    @property
    def prefix_token_id(self) -> int:
        token = self.model.prefix_token
        return self.eot_token_id if token is None else token

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.folder)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.encode(string, add_special_tokens is not False) if string else []

    def _loglikelihood_tokens(self, requests, **_: Any) -> list[tuple[float, bool]]:
        longest = max((len(target) for _, _, target in requests), default=0)
        if longest > self.model.max_length:
            raise InputError(
                f"an answer to score has {longest} tokens, but the model's context has {self.model.max_length}: choose "
                "another task."
            )
        found = self.scorer.scores([ScoredWindow([*context, *target], len(context)) for _, context, target in requests])
        return [(score.log_likelihood, score.is_greedy) for score in found]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        out = []
        for (text,) in (request.args for request in requests):
            # With the tokenizer's own first token after the prefix, so that scores equal those of lm-eval's `hf`.
            tokens = [self.prefix_token_id, *self.tok_encode(text)]
            out.append(sum(s.log_likelihood for s in self.scorer.scores(windows(tokens, self.model.max_length))))
        return out

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Continuations of the contexts, up to `batch` with the same settings together."""
        out = [""] * len(requests)
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._settings(request.args[1]), []).append(i)
        for (stop, sampling, count), members in groups.items():
            room = self.model.max_length - count
            members.sort(key=lambda i: len(requests[i].args[0]))
            for first in range(0, len(members), self.batch):
                chosen = members[first : first + self.batch]
                prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in chosen]
                for i, text in zip(
                    chosen, continue_texts(self.model, prompts, count, sampling, stop=stop), strict=True
                ):
                    out[i] = text
        return out

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        return self.model.chat_template.render(chat_history, add_generation_prompt, **self.template_arguments)

    def _settings(self, arguments: dict[str, Any]) -> tuple[tuple[str, ...], Sampling, int]:
        """(texts that end an answer, the sampling, largest number of tokens) of a request.

        As with lm-eval's `hf`, contexts are cut to make room for the answer, and one token of them must remain.
        """
        until, count = arguments.get("until") or (), int(arguments.get("max_gen_toks", MAX_TOKENS))
        if not 0 < count < self.model.max_length:
            raise InputError(
                f"max_gen_toks={count} leaves no room in the model's context of {self.model.max_length} tokens: give "
                f"1 to {self.model.max_length - 1} with --gen_kwargs."
            )
        sampled = arguments.get("do_sample", arguments.get("temperature", 0) > 0)
        sampling = Sampling(
            temperature=float(arguments.get("temperature", 1.0)) if sampled else 0.0,
            top_k=int(arguments.get("top_k", 0) or 0),
            top_p=float(arguments.get("top_p", 1.0)),
            min_p=float(arguments.get("min_p", 0.0) or 0.0),
        )
        texts = (until,) if isinstance(until, str) else tuple(until)
        return tuple(text for text in texts if text), sampling, count  # lm-eval ends no answer before an empty text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

    cli_evaluate()
