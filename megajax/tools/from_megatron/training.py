"""Steps, learning rate, optimizer, number formats, recomputation and checkpoints."""

from pathlib import Path

from megajax.megatron import METADATA, is_megatron_folder
from megajax.options.fp8_recipes import CURRENT, RECIPES
from megajax.tools.from_megatron.translation import Translation

SCHEDULES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
FORMS = {"fp32": "float32", "bf16": "bfloat16", "fp8": "int8"}
NORMS = 100  # fewest steps between norms by layer, which cost a step's gradients
SPIKE = 10.0  # Megatron's factor
MATCHING_ADAMW = 0.2  # the extra factor of spectral scales that fits AdamW's rates


class Length:
    """The steps that samples are, with a ramp-up of the batch."""

    def __init__(self, t: Translation, size: int):
        self.size = size
        length = t.settings["batch.sequence_length"].value
        schedule = t.settings["batch.schedule"].value if "batch.schedule" in t.settings else f"0: {size}"
        pairs = (entry.split(":") for entry in schedule.split(","))
        self.sizes = [(int(tokens) // length, int(each)) for tokens, each in pairs]

    @property
    def ramps(self) -> bool:
        return len(self.sizes) > 1

    def steps(self, samples: int | float) -> int:
        """The number of steps after which at least `samples` samples are read."""
        return self._steps_and_samples(samples)[0]

    def whole_steps(self, samples: int) -> int:
        """The number of steps that read at most `samples` samples: Megatron leaves out the last partial batch."""
        steps, read = self._steps_and_samples(samples)
        return steps - (read > samples)

    def _steps_and_samples(self, samples: int | float) -> tuple[int, int]:
        step, read = 0, 0
        for (_, size), end in zip(self.sizes, [*(start for start, _ in self.sizes[1:]), samples], strict=True):
            needed = max(0, -(-int(min(end, samples) - read) // size))
            step, read = step + needed, read + needed * size
        return step, read


def translate_run(t: Translation, size: int) -> None:
    """The length of the run and its learning rate; `size` is the largest number of sequences of a step."""
    length = Length(t, size)
    iterations, samples = t["train_iters"], t["train_samples"]
    if (iterations is None) == (samples is None):
        problem = (
            "a line has --train-iters or --train-samples, not both"
            if iterations
            else "no --train-iters or --train-samples"
        )
        raise t.arguments.fail(problem, "write one of them")
    names = ("train_iters", "train_samples", "exit_interval")
    if iterations is not None:
        steps, total = iterations, iterations * size
    else:
        steps, total = length.whole_steps(samples), samples
    if steps < 1:
        raise t.arguments.fail("a run has no step", "train one or more")
    t.put("run.steps", min(steps, t["exit_interval"] or steps), *names)
    if not t["mock_data"]:
        t.put("data.train_samples", max(total, 1), "train_iters", "train_samples", "global_batch_size")
    _rates(t, length, total, sampled=samples is not None)


def _rates(t: Translation, length: Length, total: int, sampled: bool) -> None:
    kind = SCHEDULES.get(t["lr_decay_style"], t["lr_decay_style"])
    t.put("schedule.kind", kind, "lr_decay_style")
    t.put("schedule.learning_rate", t.arguments.required("lr"), "lr")

    def samples_of(name: str) -> int | None:
        found = t[f"{name}_samples"] if sampled else t[f"{name}_iters"]
        return found if sampled or found is None else found * length.size

    unit = "samples" if sampled else "iters"
    other = "iters" if sampled else "samples"
    others = (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}")
    t.use(*others)
    if wrong := [name for name in t.given(*others) if t[name]]:
        problem = f"{t.arguments.shown(wrong[0])} does not go with --train-{unit}"
        raise t.arguments.fail(problem, f"write the schedule in {'samples' if sampled else 'iterations'}")
    decay = samples_of("lr_decay")
    decay = total if decay is None else decay
    warmup = samples_of("lr_warmup") or 0
    if t["lr_warmup_fraction"] is not None:
        warmup = t["lr_warmup_fraction"] * decay
    tail = samples_of("lr_wsd_decay")
    amounts = [
        warmup,
        *([decay] if kind not in ("constant", "inverse_sqrt") else []),
        *([tail] if kind == "wsd" and tail else []),
    ]
    if length.ramps or any(amount % length.size for amount in amounts):
        t.differs("sample-rates", f"train_{unit}")
    warmup_names = ("lr_warmup_fraction", f"lr_warmup_{unit}")
    t.put("schedule.warmup_steps", length.steps(warmup), *warmup_names)
    t.put("schedule.delay_steps", 1, note="Megatron's default: step t has the rate of step t - 1")
    if t["lr_warmup_init"]:
        t.differs("warmup-init", "lr_warmup_init")
    t.use(f"lr_decay_{unit}", f"lr_wsd_decay_{unit}", "min_lr")
    if kind == "constant":
        return
    t.put("schedule.min_learning_rate", t["min_lr"], "min_lr")
    if kind == "inverse_sqrt":
        if not warmup or decay < total:
            t.differs("inverse-sqrt", "lr_decay_style")
        return
    t.put(
        "schedule.decay_steps",
        max(length.steps(decay), 1),
        f"lr_decay_{unit}",
        note=f"Megatron's default: --train-{unit}",
    )
    if kind == "wsd":
        if tail is None:
            raise t.arguments.fail(f"--lr-wsd-decay-{unit} is not set", "add it to the line")
        t.put("schedule.wsd_decay_steps", max(length.steps(tail), 1), f"lr_wsd_decay_{unit}")
        t.put("schedule.wsd_decay_style", t["lr_wsd_decay_style"], "lr_wsd_decay_style")


def translate_optimizer(t: Translation) -> None:
    """The optimizer, its state and clipping."""
    kind = t["optimizer"]
    if kind in ("soap", "adaptive_muon"):
        t.refuse("optimizers are adam, sgd, lion or muon", "optimizer")
        return
    t.put("optimizer.kind", {"adam": "adamw", "dist_muon": "muon"}.get(kind, kind), "optimizer")
    t.put("optimizer.weight_decay", t["weight_decay"], "weight_decay")
    t.put("optimizer.clip_norm", t["clip_grad"], "clip_grad")
    if kind == "sgd":
        t.put("optimizer.beta1", t["sgd_momentum"], "sgd_momentum")
        if t["weight_decay"]:
            t.differs("sgd-decay", "weight_decay")
    elif kind == "lion":
        t.put("optimizer.beta1", t["lion_beta1"], "lion_beta1")
        t.put("optimizer.beta2", t["lion_beta2"], "lion_beta2")
    else:
        for key, name in (("beta1", "adam_beta1"), ("beta2", "adam_beta2"), ("epsilon", "adam_eps")):
            t.put(f"optimizer.{key}", t[name], name)
    if kind in ("muon", "dist_muon"):
        _muon(t)
    if t["decoupled_lr"] is not None:
        _decoupled(t)
    _state(t)


def _muon(t: Translation) -> None:
    t.put("optimizer.muon.momentum", t["muon_momentum"], "muon_momentum")
    t.put("optimizer.muon.nesterov", t["muon_nesterov"], "muon_nesterov")
    t.put("optimizer.muon.steps", t["muon_num_ns_steps"], "muon_num_ns_steps")
    names = ("muon_scale_mode", "muon_extra_scale_factor")
    scales = {("spectral", MATCHING_ADAMW): "match_adamw", ("shape_scaling", 1.0): "spectral"}
    if scale := scales.get((t[names[0]], t[names[1]])):
        t.put("optimizer.muon.scale", scale, *names)
    else:
        t.refuse("scales are spectral with the extra factor 0.2, or shape_scaling with 1", *names)
    t.use("muon_tp_mode")
    if not t["muon_split_qkv"]:
        t.refuse("queries, keys and values are always matrices of their own", "muon_split_qkv")


def _decoupled(t: Translation) -> None:
    """A rate of its own for embeddings and head: a multiple of the schedule's, its lowest one too."""
    factor = t["decoupled_lr"] / t.arguments.required("lr")
    lowest = t["min_lr"] if t["decoupled_min_lr"] is None else t["decoupled_min_lr"]
    if abs(lowest - factor * t["min_lr"]) > 1e-5 * max(lowest, t["min_lr"]):  # the cure's digits
        cure = f"write --decoupled-min-lr {factor * t['min_lr']:g}"
        t.refuse(f"its lowest rate is {factor:g} x --min-lr: {cure}", "decoupled_lr")
    group = {"parameters": ["embedding.*", "head"], "learning_rate": float(f"{factor:.12g}")}
    t.put("optimizer.groups", [group], "decoupled_lr", "decoupled_min_lr")


def _state(t: Translation) -> None:
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    if t["use_precision_aware_optimizer"]:
        forms = {FORMS.get(t[name]) for name in names}
        if len(forms) > 1 or None in forms:
            t.refuse("both moments have one form: fp32, bf16 or fp8", *names)
        else:
            t.put("optimizer.state", forms.pop(), *names)
        if t["main_params_dtype"] != "fp32":
            t.refuse("master weights are FP32 numbers", "main_params_dtype")
        elif t["bf16"]:
            t.put("optimizer.master", "split", "use_precision_aware_optimizer", "main_params_dtype")
        t.use("use_precision_aware_optimizer", "main_params_dtype")
    if t["optimizer_cpu_offload"]:
        t.put(
            "optimizer.offload", t["optimizer_offload_fraction"], "optimizer_cpu_offload", "optimizer_offload_fraction"
        )


def translate_precision(t: Translation) -> None:
    """Formats of activations, gradients and FP8 matmuls."""
    if t["bf16"] and t["fp16"]:
        raise t.arguments.fail("--bf16 excludes --fp16", "remove one of them")
    compute = "bfloat16" if t["bf16"] else "float16" if t["fp16"] else "float32"
    t.put("precision.compute", compute, "bf16", "fp16")
    t.use("accumulate_allreduce_grads_in_fp32", "main_grads_dtype", "grad_reduce_in_bf16")
    in_bf16 = t["bf16"] and (t["grad_reduce_in_bf16"] or t["main_grads_dtype"] == "bf16")
    for key in ("gradients", "accumulation"):
        names = ("grad_reduce_in_bf16", "main_grads_dtype", "accumulate_allreduce_grads_in_fp32")
        t.put(f"precision.{key}", "bfloat16" if in_bf16 else "float32", *names)
    if t["fp16"] and not t["accumulate_allreduce_grads_in_fp32"]:
        t.differs("fp16-gradients", "fp16")
    if t["fp8"] and t["fp4"]:
        raise t.arguments.fail("--fp8-format excludes --fp4-format", "remove one of them")
    if t["fp8"] or t["fp4"]:
        _fp8(t)


def _fp8(t: Translation) -> None:
    prefix, form = "precision.fp8.", "fp8" if t["fp8"] else "fp4"
    name = f"{form}_recipe"
    t.use(form, "transformer_impl")
    if t[name] == "custom":
        t.refuse("run.extensions registers a recipe of your own, in megajax's form", name)
        return
    recipe = CURRENT.name if t[name] == "tensorwise" else t[name]
    t.put(f"{prefix}recipe", recipe, form, name)
    if RECIPES[recipe].has_kernels:
        t.put(f"{prefix}format", t["fp8"], "fp8")
    if RECIPES[recipe].keeps_history:
        t.put(f"{prefix}amax_history_length", t["fp8_amax_history_len"], "fp8_amax_history_len")
        t.put(f"{prefix}amax_algorithm", t["fp8_amax_compute_algo"], "fp8_amax_compute_algo")
        t.put(f"{prefix}margin", t["fp8_margin"], "fp8_margin")
    if t["first_last_layers_bf16"]:
        for end, name in (("first", "num_layers_at_start_in_bf16"), ("last", "num_layers_at_end_in_bf16")):
            t.put(f"{prefix}{end}_bf16_layers", t[name], name, "first_last_layers_bf16")


def translate_recompute(t: Translation) -> None:
    """What the backward pass computes again, and what waits on the host."""
    granularity = "selective" if t["recompute_activations"] else t["recompute_granularity"]
    names = ("recompute_activations", "recompute_granularity")
    t.use("recompute_modules", "recompute_method", "recompute_num_layers", "moe_layer_recompute", *names)
    if t["cpu_offloading"] or t["cpu_offloading_num_layers"] or t["fine_grained_activation_offloading"]:
        offloads = ("cpu_offloading", "cpu_offloading_num_layers", "fine_grained_activation_offloading")
        t.put("remat.policy", "offload", *offloads)
    elif granularity == "full":
        if t["recompute_method"] is None or not t["recompute_num_layers"]:
            cure = "add --recompute-method uniform --recompute-num-layers 1"
            raise t.arguments.fail("--recompute-granularity full needs a method and a number of layers", cure)
        t.put("remat.policy", "full", *names)
        key = "remat.group" if t["recompute_method"] == "uniform" else "remat.layers"
        t.put(key, t["recompute_num_layers"], "recompute_num_layers", "recompute_method")
    elif granularity == "selective":
        modules = t["recompute_modules"] or ["core_attn"]
        t.put("remat.policy", "selective" if "core_attn" in modules else "save_matmuls", *names, "recompute_modules")
        if modules != ["core_attn"]:
            t.differs("recompute", "recompute_modules")
    else:
        t.put("remat.policy", "none", *names)
        if t["moe_layer_recompute"]:
            t.differs("recompute", "moe_layer_recompute")


def translate_records(t: Translation) -> None:
    """Logs, evaluations, checkpoints and the like."""
    t.put("run.seed", t["seed"], "seed")
    t.put("run.log_interval", t["log_interval"], "log_interval")
    t.copy("run.deterministic", "deterministic_mode")
    t.copy("run.max_minutes", "exit_duration_in_mins", float(t["exit_duration_in_mins"] or 1))
    t.copy("run.replica_check_interval", "check_weight_hash_across_dp_replicas_interval")
    t.copy("run.hang_min_seconds", "distributed_timeout_minutes", float(t["distributed_timeout_minutes"] * 60))
    t.copy("logging.norms_interval", "log_params_norm", t["log_interval"] * -(-NORMS // t["log_interval"]))
    if t["check_for_spiky_loss"]:
        t.put("run.spike_factor", SPIKE, "check_for_spiky_loss")
        t.differs("spikes", "check_for_spiky_loss")
    t.copy("run.name", "wandb_exp_name")
    t.put("logging.tensorboard", t["tensorboard_dir"] is not None, "tensorboard_dir")
    if t["wandb_project"]:
        t.put("logging.wandb", True, "wandb_project")
        t.put("logging.wandb_project", t["wandb_project"], "wandb_project")
    if t["profile"]:
        t.put(
            "logging.profile_start",
            max(t["profile_step_start"], 1),
            "profile",
            "profile_step_start",
            "use_pytorch_profiler",
        )
        steps = t["profile_step_end"] - t["profile_step_start"]
        t.put("logging.profile_steps", max(steps, 1), "profile_step_end", "profile_step_start")
    _checkpoints(t)


def _checkpoints(t: Translation) -> None:
    t.copy("run.dir", "save")
    if t["save"] is None and "/" in (name := t["wandb_exp_name"] or ""):  # no name of a folder
        t.put("run.dir", f"runs/{name.replace('/', '_')}", "wandb_exp_name")
    interval = t["save_interval"]
    if t["save"] is not None:
        t.put("run.checkpoint_interval", t.arguments.required("save_interval"), "save_interval")
        if t["save_retain_interval"]:
            t.put("checkpoint.keep", 1, "save_retain_interval")
            t.put("checkpoint.keep_every", t["save_retain_interval"], "save_retain_interval")
        elif (t["most_recent_k"] or -1) > 0:
            t.put("checkpoint.keep", t["most_recent_k"], "most_recent_k")
        else:
            t.put("checkpoint.keep_every", interval, note="Megatron's default: all checkpoints are kept")
        t.use("most_recent_k")
    if t["no_save_optim"]:
        t.put("checkpoint.save_optimizer", False, "no_save_optim")
    if t["non_persistent_ckpt_type"] == "local" and t["non_persistent_local_ckpt_dir"]:
        t.put(
            "checkpoint.local_dir",
            t["non_persistent_local_ckpt_dir"],
            "non_persistent_local_ckpt_dir",
            "non_persistent_ckpt_type",
        )
        t.copy("checkpoint.local_interval", "non_persistent_save_interval")
    _initial_state(t)


def _initial_state(t: Translation) -> None:
    """Where a run without checkpoints begins: `--load` goes on with a checkpoint's training, `--finetune` does not."""
    load, save, pretrained = t["load"], t["save"], t["pretrained_checkpoint"]
    t.use("load", "pretrained_checkpoint", "finetune", "no_load_optim", "load_main_params_from_ckpt")
    if t["moe_use_upcycling"]:
        t.put("checkpoint.upcycle", True, "moe_use_upcycling")
        if t["moe_router_pre_softmax"] or not t["finetune"]:
            t.differs("upcycling", "moe_use_upcycling")
    if load is not None and load == save:
        if is_megatron_folder(load):
            t.put("run.dir", f"{save}_megajax", "save", "load")
        else:
            load = None
            t.warnings.append(
                f"{t.arguments.shown('load')}: --save is the same, and has no checkpoint of Megatron-LM here, so the "
                "run begins anew and resumes its own: to go on with one, set checkpoint.init_from, "
                "checkpoint.init_state=all and another run.dir."
            )
    if load is None:
        t.copy("checkpoint.resume_step", "ckpt_step")
        if pretrained is not None:
            t.put("checkpoint.init_from", pretrained, "pretrained_checkpoint")
            t.put("checkpoint.init_state", "weights", "pretrained_checkpoint")
        return
    if t["ckpt_step"] is not None and not (Path(load) / METADATA).is_file():
        load = f"{load}/iter_{t['ckpt_step']:07d}"
    t.put("checkpoint.init_from", load, "load", "ckpt_step")
    if t["finetune"] or t["moe_use_upcycling"]:
        t.put("checkpoint.init_state", "weights", "finetune", "moe_use_upcycling")
    elif t["no_load_optim"]:
        t.put("checkpoint.init_state", "position", "no_load_optim")
        t.differs("no-load-optim", "no_load_optim")
    else:
        t.put("checkpoint.init_state", "all", "load")
