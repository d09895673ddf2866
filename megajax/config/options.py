"""The answer to an unknown option of a command: our option, or the key of a config, for another framework's name."""

import difflib
import re
from collections.abc import Sequence

from megajax.config.load import suggestion
from megajax.config.other_names import by_word, counterpart, plain
from megajax.schema.fields import AXES

# Our option: its names in torchrun, accelerate, Megatron's tools, transformers and vLLM. It counts where it exists.
OPTIONS = {
    "--processes": "nproc_per_node nproc num_processes ntasks_per_node",
    "--gpus": "num_gpus n_gpus ngpus world_size num_devices devices",
    "--devices": "num_gpus n_gpus ngpus world_size num_devices gpus",
    "--hosts-of": "gpus_per_node num_gpus_per_node n_gpus_per_node nproc_per_node",
    "--per-process": "gpus_per_node num_gpus_per_node n_gpus_per_node nproc_per_node",
    "--device": "gpu_type device_type accelerator hardware",
    "--tokens": "max_new_tokens max_tokens max_length num_tokens_to_generate tokens_to_generate out_seq_length",
    "--stop": "stop_words stop_strings until",
    "--speculate": "num_speculative_tokens num_draft_tokens",
    "--tokenizer": "tokenizer_type tokenizer_model tokenizer_name_or_path vocab_file merge_file",
    "--json-key": "json_keys text_column text_key",
    "--append-eod": "append_eos add_eos",
    "--prepend-bos": "append_bos add_bos",
    "--output-prefix": "output output_dir output_path",
    "--dtype": "torch_dtype bf16 fp16",
    "--chat": "apply_chat_template chat_template messages",
    "--data": "dataset datasets valid_data_path test_data_path",
}
# Options of transformers, vLLM and lm-eval that the commands with --mesh, which load a model, do not have: the reason.
OF_MODELS = {
    "batch_size max_num_seqs per_device_eval_batch_size": "leave it out; the command makes its own batches",
    "do_sample": "--temperature 0 takes the likeliest token, and a higher one samples",
    "num_beams repetition_penalty length_penalty no_repeat_ngram_size presence_penalty frequency_penalty typical_p"
    " num_return_sequences n": "tokens are chosen by --temperature, --top-k, --top-p and --min-p only",
    "device device_map": "--mesh divides the model over the devices; JAX_PLATFORMS=cpu in the environment takes CPUs",
    "load_in_8bit load_in_4bit quantization": "--dtype is the format, float32, bfloat16 or float16",
    "tasks num_fewshot": "python -m megajax.inference.lm_eval runs lm-eval's tasks (docs/inference.md)",
}
# Names of commands elsewhere, and what to write.
COMMANDS = {
    "sft finetune fine_tune fit pretrain run": "write megajax train; a config has the data and checkpoint.init_from",
    "dpo grpo ppo reward rlhf": "docs/data.md has preferences by megajax train, docs/custom_loop.md GRPO",
    "infer inference predict complete sample": "write megajax generate",
    "serve vllm api": "no command serves; megajax hf export writes a folder for servers, and megajax generate tries it",
    "eval lm_eval test score perplexity": "write megajax evaluate, or python -m megajax.inference.lm_eval for tasks",
    "convert from_hf from_pretrained": "write megajax hf import",
    "export to_hf save_pretrained merge merge_lora merge_and_unload merge_weights": (
        "write megajax hf export, which merges adapters; megajax average joins checkpoints"
    ),
    "tokenize prepare": "write megajax preprocess",
    "estimate_memory": "write megajax plan, or megajax compile",
    "download pull push upload login": (
        "nothing is downloaded or uploaded; give folders that are on this machine, and megajax hf export writes one"
    ),
}
# Only `launch` has --processes.
SEVERAL_HOSTS = (
    *("nnodes", "num_nodes", "num_machines", "node_rank", "machine_rank", "hostfile", "master_addr", "master_port"),
    *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "main_process_ip", "main_process_port"),
)
CONFIGS = ("config", "config_file", "job.config_file", "cfg")  # options with the file, of which ours is an argument
NEAR = 0.7


def meant(option: str, value: str, options: Sequence[str], takes_keys: bool) -> str:
    """What to write for the unknown `option` with its `value` ("" for none), without a full stop; "" if unknown.

    `options` are those of the command; `takes_keys`: it takes overrides of a config's keys too.
    """
    name = plain(option)
    if own := next((own for own, names in OPTIONS.items() if own in options and name in names.split()), None):
        return f"did you mean {own}?"
    if "--mesh" in options and not takes_keys and (reason := by_word(OF_MODELS).get(name)):
        return reason
    if "--processes" in options and name in SEVERAL_HOSTS:
        return "it starts the processes of one host; scripts/slurm/train.sbatch starts those of several"
    if takes_keys and name in CONFIGS:
        return "write the name of the config alone, without an option"
    near = difflib.get_close_matches(option, options, 1, NEAR)
    # --tp is near --top, but it is a name of mesh.tensor.
    if near and not (counterpart(option) and (takes_keys or "--mesh" in options)):
        return f"did you mean {near[0]}?"
    cure = suggestion(option)
    if not (key := re.fullmatch(r"did you mean ([\w.]+)(=.+)?\?", cure)):
        return "" if cure.startswith(("the sections are", "did you mean the section")) else cure.removesuffix(".")
    section, _, last = key[1].rpartition(".")
    given = key[2] or f"={value or 'VALUE'}"
    if takes_keys:
        return f"write {key[1]}{given}"
    if "--mesh" in options and section == "mesh" and last in AXES:
        return f"write --mesh {last}{given}"
    return f"{key[1]} is a key of a run's config"


def command_cure(name: str, own: Sequence[str] = ()) -> str:
    """What to write for a command of another project, without a full stop; "" for a name that is near one of `own`."""
    return "" if difflib.get_close_matches(name, own, 1, 0.75) else by_word(COMMANDS).get(plain(name), "")
