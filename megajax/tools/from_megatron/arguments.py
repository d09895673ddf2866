"""Megatron-LM's arguments: those of a launch line, of its YAML or of a mapping, with Megatron's defaults."""

import ast
import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megajax.config.megatron_flags import DEFAULTS, FLAGS, Flag
from megajax.config.sentences import listed
from megajax.errors import InputError, shown
from megajax.files import read_text, why_unreadable
from megajax.tools.from_megatron.shell_values import Values

MAX_BYTES = 2**20  # of a YAML file
MAX_LAYERS = 1000
MAX_PATTERN = 1000  # characters of a list expression
SECTIONS = ("language_model", "model_parallel", "MODEL_ARGS")  # of Megatron's YAML files
# The values of `activation_func` in these files, where GELU is never fused with a bias. It decides without the flags.
ACTIVATIONS = {"swiglu": {"swiglu": True}, "squaredrelu": {"squared_relu": True}, "gelu": {"bias_gelu_fusion": False}}
ACTIVATION_FLAGS = ("swiglu", "squared_relu", "openai_gelu", "quick_geglu")
YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}  # without its flags
_CHOICES = {  # values that Megatron-LM accepts, of flags with few
    "normalization": ("LayerNorm", "RMSNorm"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("exponential", "linear", "cosine", "minus_sqrt"),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex", "alltoall_seq"),
    "moe_token_drop_policy": ("probs", "position"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "fp8": ("e4m3", "hybrid"),
    "fp8_recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "fp4": ("e2m1",),
    "fp4_recipe": ("nvfp4", "custom"),
    "main_grads_dtype": ("fp32", "bf16"),
    "rope_type": ("rope", "yarn"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "non_persistent_ckpt_type": ("global", "local", "in_memory"),
}
# Numbers of things, of which there is at least one
_COUNTS = (
    *("num_layers", "encoder_num_layers", "hidden_size", "num_attention_heads", "make_vocab_size_divisible_by"),
    *("seq_length", "encoder_seq_length", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances"),
)


class Arguments:
    """Values by Megatron's names of arguments: those that are given, and Megatron's defaults."""

    def __init__(
        self,
        given: Mapping[str, Any],
        texts: Mapping[str, str],
        location: str,
        known: Callable[[str, str], str] = lambda text, _: text,
    ):
        self.given, self.texts, self.location = dict(given), dict(texts), location
        self.known = known  # raises InputError for a text that only an execution would give
        self.used: set[str] = set()
        for name, choices in _CHOICES.items():
            if (value := self[name]) is not None and value not in choices:
                raise self.fail(f"{self.shown(name)} is none of {listed(choices)}", "correct it")
        for name in _COUNTS:
            if (value := self[name]) is not None and value < 1:
                raise self.fail(f"{self.shown(name)} is below 1", "use 1 or more")
        if (rate := self["lr"]) is not None and rate <= 0:
            raise self.fail(f"{self.shown('lr')} is not above 0", "use more")
        if (share := self["lr_warmup_fraction"]) is not None and not 0 <= share < 1:
            raise self.fail(f"{self.shown('lr_warmup_fraction')} is no share of the decay", "use 0 to below 1")

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, DEFAULTS[name])

    def shown(self, name: str) -> str:
        """An argument as it is written in the line: --name value."""
        return shown(self.texts.get(name, f"--{name.replace('_', '-')} {self[name]}"))

    def fail(self, problem: str, cure: str) -> InputError:
        return InputError(f"{problem} ({self.location}): {cure}.")

    def required(self, name: str) -> Any:
        if self[name] is None:
            raise self.fail(f"--{name.replace('_', '-')} is not set", "add it to the line")
        return self[name]

    def layer_list(self, name: str) -> int | list[int] | None:
        """A frequency, or the numbers of a list expression such as ([0]*3+[1]*2)*2; None without either."""
        value = self[name]
        if value is None or isinstance(value, int | list):
            return value
        try:
            return int(value) if re.fullmatch(r"\d{1,9}", value) else _list(value)
        except ValueError:
            problem = f"{self.shown(name)} is neither a number nor a list expression such as [0]*3+[1]*58"
            raise self.fail(problem, "correct it") from None


def _list(text: str) -> list[int]:
    if len(text) > MAX_PATTERN or re.search(r"[^\d\s\[\]()+*,]", text):
        raise ValueError
    try:
        found = _items(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError from None
    if not isinstance(found, list):
        raise ValueError
    return found


def _items(node: ast.expr) -> int | list[int]:
    found: Any = None
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MAX_LAYERS:
        found = node.value
    elif isinstance(node, ast.List):
        found = [_items(item) for item in node.elts]
    elif isinstance(node, ast.BinOp):
        one, other = _items(node.left), _items(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(one, list) != isinstance(other, list):
            found = one * other  # pyright: ignore
        elif isinstance(node.op, ast.Add) and isinstance(one, list) and isinstance(other, list):
            found = one + other
    if found is None or (isinstance(found, list) and len(found) > MAX_LAYERS):
        raise ValueError
    return found


def from_words(words: list[str], values: Values, location: str) -> Arguments:
    """The arguments of a launch line's words. `InputError` names all unknown flags, each with the nearest."""
    given: dict[str, Any] = {}
    texts: dict[str, str] = {}
    unknown, at = [], 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        flag = FLAGS.get(name[2:]) if name.startswith("--") else None
        taken = [value] if equals else []
        at += 1
        while at < len(words) and not _is_flag(words[at]) and not equals:
            if flag is not None and (not flag.takes_value or (flag.kind != "many" and taken)):
                break
            taken.append(words[at])
            at += 1
        if flag is None:
            unknown.append(values.known(name, "a flag"))
            continue
        given[flag.dest] = _value(flag, taken, values, location)
        texts[flag.dest] = values.written(" ".join([name, *taken]))
    if unknown:
        raise InputError(_unknown_sentence(unknown, location))
    return Arguments(given, texts, location, values.known)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.match(r"-\.?\d", word)


def _value(flag: Flag, taken: list[str], values: Values, location: str) -> Any:
    name = f"--{flag.name}"
    if flag.takes_value != bool(taken):
        problem = f"{name} has no value" if not taken else f"{name} takes no value, but has {shown(' '.join(taken))}"
        raise InputError(f"{problem} ({location}): {'give it one' if not taken else 'remove it'}.")
    if flag.kind in ("int", "float"):
        taken = [values.known(word, name) for word in taken]
    try:
        return flag.value_of(taken)
    except ValueError:
        kind = {"int": "an integer", "float": "a number"}[flag.kind]
        raise InputError(f"{name} {shown(taken[0])} is not {kind} ({location}): correct it.") from None


def _unknown_sentence(unknown: list[str], location: str) -> str:
    answers = []
    for name in dict.fromkeys(unknown):
        near = difflib.get_close_matches(name.lstrip("-"), FLAGS, 1, 0.7)
        answers.append(f"{shown(name)}: " + (f"did you mean --{near[0]}?" if near else "no flag is near"))
    if len(answers) == 1:
        name, answer = answers[0].split(": ", 1)
        return f"{name} is not a flag of Megatron-LM ({location}): {answer.replace('no flag is near', 'remove it.')}"
    return f"{len(answers)} words are not flags of Megatron-LM ({location}), remove or correct them:\n  " + "\n  ".join(
        answers
    )


def from_mapping(values: Mapping[str, Any], location: str) -> Arguments:
    """Arguments from a mapping of Megatron's names to values, such as those that are saved in a checkpoint.

    What Megatron derives from other arguments is left out.
    """
    derived = {
        *_DERIVED,
        *(["global_batch_size"] if values.get("_is_global_batch_size_explicitly_specified") is False else []),
    }
    given = {
        DESTS[name].dest: _plain(DESTS[name], value)
        for name, value in values.items()
        if name in DESTS and name not in derived and value is not None
    }
    changed = {name: value for name, value in given.items() if value not in (DEFAULTS[name], [])}
    return Arguments(changed, {name: f"{name}={value}" for name, value in changed.items()}, location)


def _plain(flag: Flag, value: Any) -> Any:
    """A saved value as the flag has it: dtypes and enumerations by name, a single value of several in a list."""
    if isinstance(value, bool | int | float) and flag.kind != "many":
        return value
    if isinstance(value, list | tuple):
        return [str(item) for item in value] if flag.kind == "many" else list(value)
    text = str(value)
    text = _DTYPES.get(text, text.rpartition(".")[2] if text.startswith("AttnBackend.") else text)
    return [text] if flag.kind == "many" else text


def from_yaml(path: Path) -> Arguments:
    """The arguments of a YAML file: of --yaml-cfg, or flags with values as in Megatron's own tests."""
    try:
        text = os.path.expandvars(read_text(path, MAX_BYTES))
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise InputError(
                f"{path} has an alias, *NAME, which may stand for very many values: write the value itself."
            )
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{shown(path)} cannot be read, {why_unreadable(error)}: correct the path.") from None
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid YAML ({shown(error)}): correct it.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} has no arguments: give a YAML file with names and values.")
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if name in SECTIONS and isinstance(value, dict):
            flat |= value
        elif not str(name).isupper():  # ENV_VARS and the like
            flat[name] = value
    if any(str(name).startswith("--") for name in flat):
        return from_words(_words(flat), Values(str(path), [""]), str(path))
    return _from_names(flat, path)


def _words(flat: dict[str, Any]) -> list[str]:
    """The words of a mapping from flags to values; false is a flag that is not given."""
    words = []
    for name, value in flat.items():
        if value is None or value is False:
            continue
        items = [] if value is True else value if isinstance(value, list) else [value]
        words += [str(name), *map(str, items)]
    return words


def _from_names(flat: dict[str, Any], path: Path) -> Arguments:
    """The arguments of --yaml-cfg, which has the names of TransformerConfig."""
    given: dict[str, Any] = {}
    if flat.get("activation_func") is not None:
        flat = {name: value for name, value in flat.items() if name not in ACTIVATION_FLAGS}
    if "num_query_groups" in flat:  # it decides alone too
        flat = flat | {"group_query_attention": None if flat["num_query_groups"] is None else True}
    for name, value in flat.items():
        value = " ".join(value.split()) if isinstance(value, str) else value
        if name == "activation_func" and value is not None:
            if str(value) not in ACTIVATIONS:
                raise InputError(f"{name}: {shown(value)} is none of {listed(ACTIVATIONS)} ({path}): correct it.")
            given |= ACTIVATIONS[value]
        elif dest := DESTS.get(str(name)):
            given |= {} if value is None else {dest.dest: _typed(dest, value, path)}
        elif name in _FIXED:
            if value not in (None, _FIXED[name]):
                raise InputError(f"{name}: {shown(value)} is not possible here ({path}): it is {_FIXED[name]:g}.")
        elif value not in (None, False, [], "") and str(name) not in _OF_THE_CONFIG:
            raise InputError(_unknown_sentence([str(name)], str(path)))
    return Arguments(given, {name: f"{name}: {value}" for name, value in given.items()}, str(path))


def _typed(flag: Flag, value: Any, path: Path) -> Any:
    if not flag.takes_value:
        if not isinstance(value, bool):
            raise InputError(f"{flag.dest}: {shown(value)} is neither true nor false ({path}): correct it.")
        return value
    if flag.kind == "many":
        return [str(item) for item in (value if isinstance(value, list) else str(value).split())]
    try:
        return value if isinstance(value, list) else flag.value_of([str(value)])
    except ValueError:
        raise InputError(f"{flag.dest}: {shown(value)} is no {flag.kind} ({path}): correct it.") from None


_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
# Arguments that Megatron sets from others.
_DERIVED = ("start_weight_decay", "end_weight_decay", "eval_global_batch_size", "eval_micro_batch_size") + (
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
)
DESTS = {flag.dest: flag for flag in reversed(FLAGS.values())} | {
    "num_moe_experts": FLAGS["num-experts"],
    "fp8_param": FLAGS["fp8-param-gather"],
    "num_layers_in_first_pipeline_stage": FLAGS["decoder-first-pipeline-num-layers"],
    "num_layers_in_last_pipeline_stage": FLAGS["decoder-last-pipeline-num-layers"],
}
# No flags: of TransformerConfig or of older files, and without effect on numbers, or Megatron sets them from others.
_OF_THE_CONFIG = {
    *("gated_linear_unit", "bias_activation_fusion", "persist_layer_norm", "memory_efficient_layer_norm"),
    *("params_dtype", "pipeline_dtype", "autocast_dtype", "virtual_pipeline_model_parallel_size"),
    *("batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs", "scatter_gather_tensors_in_pipeline"),
    *("tp_comm_atomic_ag", "tp_comm_atomic_rs", "cpu_offloading_activations", "cuda_graph_use_single_mempool"),
    *("inference_sampling_seed", "retriever_seq_length", "one_logger_entity"),
}
# No flags either: latent attention's YaRN, and a division of weights that counts as replicas.
_FIXED = YARN | {"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1}
