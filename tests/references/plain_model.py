"""A language model and its loss written out plainly, for values that a test can hold the train step to.

Nothing here comes from megajax: a mesh that is compared with one device runs the same code, so an error in both would
not be seen. One function is the whole model; it takes NumPy (values in FP64) or jax.numpy (`gradients`). Weights have
megajax's canonical names and shapes, options the names of the config section `model`. A batch has fields `[M, B, S]`
with M microbatches.

Random numbers are jax's. K is `fold_in(key(run.seed + 1), step)`, and a token's number is its place in the global
batch, `sequence · S + index`. Every mask is drawn for one token, by `fold_in(k, number)`:

    k                                            what
    fold_in(K, 0)                                dropout after the embedding
    fold_in(K, 2 · layer + 1), + 2               dropout of attention and of the MLP or the experts
    fold_in(fold_in(K, 2³¹), layer)              jitter of a router's input
    fold_in(K, 2³¹ + 2 + m), in place of K       both kinds of dropout in prediction module m, layer num_layers + m
"""

import math
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Options = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]
JITTER, MODULES = 2**31, 2**31 + 2


class Draws:
    """Factors of dropout and jitter `[M, B, S, D]` for one step, each drawn once: FP64 mode has other numbers."""

    def __init__(self, model: Options, shape: tuple[int, int, int], seed: int, step: int):
        self.model, self.shape = model, shape
        self.key, self.drawn = jax.random.fold_in(jax.random.key(seed + 1), step), dict[Any, np.ndarray]()

    def of(self, drawn: dict[Any, Any]) -> "Draws":
        """These factors in place of drawn ones, such as those of some microbatches."""
        other = copy(self)
        other.drawn = drawn
        return other

    def _by_token(self, draw: Any, amount: float, *path: int) -> np.ndarray:
        if path not in self.drawn:
            ids, width = np.arange(math.prod(self.shape), dtype=np.uint32), self.model["hidden_size"]
            factors = draw_by_token(draw, amount, width, self.key, np.array(path, np.uint32), ids)
            self.drawn[path] = np.asarray(factors, np.float64).reshape(*self.shape, width)
        return self.drawn[path]

    def dropout(self, number: int, module: int | None = None) -> np.ndarray | float:
        """Factors 0 or 1 / (1 - rate); `number` is 0 after the embedding, else 2 · layer + branch, branch 1 or 2."""
        rate = self.model["dropout"]
        if not rate:
            return 1.0
        path = (number,) if module is None else (MODULES + module, number)
        return self._by_token(kept, rate, *path) / (1 - rate)

    def jitter(self, layer: int) -> np.ndarray | float:
        """Factors between 1 - jitter and 1 + jitter."""
        amount = self.model["router"]["jitter"]
        return self._by_token(noise, amount, JITTER, layer) if amount else 1.0


def kept(key: Any, rate: float, width: int) -> jax.Array:
    return jax.random.bernoulli(key, 1 - rate, (width,))


def noise(key: Any, amount: float, width: int) -> jax.Array:
    return jax.random.uniform(key, (width,), jnp.float32, 1 - amount, 1 + amount)


@partial(jax.jit, static_argnums=(0, 1, 2))
def draw_by_token(draw: Any, amount: float, width: int, key: Any, path: Any, ids: Any) -> jax.Array:
    """`[len(ids), width]`; one program for all masks of a kind."""
    for number in path:
        key = jax.random.fold_in(key, number)
    return jax.vmap(lambda token: draw(jax.random.fold_in(key, token), amount, width))(ids)


class NoDraws:
    """Evaluation: no dropout and no jitter."""

    def dropout(self, number: int, module: int | None = None) -> float:
        return 1.0

    def jitter(self, layer: int) -> float:
        return 1.0


def normalised(xp, model: Options, x, weights, name: str):
    """RMSNorm or LayerNorm over the last axis."""
    if model["norm"] == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / xp.sqrt((x * x).mean(-1, keepdims=True) + model["norm_epsilon"])
    return x * (weights[name] + model["norm_zero_centred"]) + weights.get(f"{name}_bias", 0.0)


def log_sum_exp(xp, x):
    most = x.max(-1, keepdims=True)
    return (most + xp.log(xp.exp(x - most).sum(-1, keepdims=True)))[..., 0]


def softmax(xp, x):
    return xp.exp(x - log_sum_exp(xp, x)[..., None])


def sigmoid(xp, x):
    return 1 / (1 + xp.exp(-x))


def turned(xp, model: Options, x, positions):
    """Rotary positions of `x [B, S, N, H]`: element i is turned together with i + H/2."""
    if model["position"] != "rope":
        return x
    half = x.shape[-1] // 2
    # Angles in FP32, as every model on a GPU has them: those of FP64 differ by 1e-7 of the position.
    frequencies = (model["rope_theta"] ** (-np.arange(half) / half)).astype(np.float32)
    angles = (positions.astype(np.float32)[..., None, None] * frequencies).astype(np.float64)
    first, second = x[..., :half], x[..., half:]
    cos, sin = xp.cos(angles), xp.sin(angles)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(xp, model: Options, w, x, positions, documents):
    """`x [B, S, D]` → (`[B, S, D]`, the largest log-sum-exp of scores of each head `[N]`)."""
    h = normalised(xp, model, x, w, "attention.norm")
    q, k, v = (
        xp.einsum("bsd,dnh->bsnh", h, w[f"attention.{name}"]) + w.get(f"attention.{name}_bias", 0.0)
        for name in ("query", "key", "value")
    )
    if model["qk_norm"]:  # only in the models with LayerNorm
        assert model["qk_norm"] == model["norm"] == "layernorm"
        q, k = (normalised(xp, model, a, w, f"attention.{n}_norm") for a, n in ((q, "query"), (k, "key")))
    q, k = turned(xp, model, q, positions), turned(xp, model, k, positions)
    groups = q.shape[2] // k.shape[2]  # queries that share a head of keys and values stand side by side
    k, v = xp.repeat(k, groups, axis=2), xp.repeat(v, groups, axis=2)
    scores = xp.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(q.shape[-1])
    S = x.shape[1]
    seen = (np.arange(S)[:, None] >= np.arange(S)) & (documents[:, :, None] == documents[:, None, :])
    scores = xp.where(seen[:, None], scores, -1e30)
    out = xp.einsum("bnst,btnh->bsnh", softmax(xp, scores), v)
    out = xp.einsum("bsnh,nhd->bsd", out, w["attention.output"]) + w.get("attention.output_bias", 0.0)
    return out, xp.maximum(log_sum_exp(xp, scores).max((0, 2)), 0)


def activated(xp, model: Options, gate, up):
    if model["activation"] == "swiglu":
        return gate * sigmoid(xp, gate) * up
    assert model["activation"] == "gelu", model["activation"]
    return 0.5 * up * (1 + xp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))


def feed_forward(xp, model: Options, h, w, prefix: str):
    """The MLP with the weights `prefix + gate`, `up` and `down`."""
    gate = h @ w[f"{prefix}gate"] if f"{prefix}gate" in w else None
    up = h @ w[f"{prefix}up"] + w.get(f"{prefix}up_bias", 0.0)
    return activated(xp, model, gate, up) @ w[f"{prefix}down"] + w.get(f"{prefix}down_bias", 0.0)


def chosen_experts(model: Options, scores: np.ndarray) -> np.ndarray:
    """`scores [T, E]` → whether a token goes to an expert, `[T, E]`: its best k of the best groups of experts."""
    r, k = model["router"], model["experts_per_token"]
    tokens, experts = scores.shape
    in_groups = scores.reshape(tokens, r["num_groups"], -1)
    counted = 1 if r["group_score"] == "max" else max(k // r["groups_per_token"], 1)
    of_group = np.sort(in_groups, -1)[..., -counted:].sum(-1)
    best = np.argsort(-of_group, -1, kind="stable")[:, : r["groups_per_token"]]
    allowed = np.repeat((best[..., None] == np.arange(r["num_groups"])).any(1), experts // r["num_groups"], 1)
    best = np.argsort(-np.where(allowed, scores, -np.inf), -1, kind="stable")[:, :k]
    return (best[..., None] == np.arange(experts)).any(1)


def kept_assignments(model: Options, chosen: np.ndarray, weights: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Those of the `chosen [T, E]` within each expert's capacity: the largest weights, or the first of the batch."""
    r, tokens = model["router"], int(real.sum())
    if r["capacity_factor"] is None:
        return chosen
    capacity = math.ceil(round(r["capacity_factor"] * tokens * model["experts_per_token"] / model["num_experts"], 6))
    kept = np.zeros_like(chosen)
    for expert in range(chosen.shape[1]):
        tokens_of_it = np.flatnonzero(chosen[:, expert])
        if r["drop_policy"] == "probability":
            tokens_of_it = tokens_of_it[np.argsort(-weights[tokens_of_it, expert], kind="stable")]
        kept[tokens_of_it[:capacity], expert] = True
    return kept


def mixture(xp, model: Options, w, bias, x, jitter, real, shared_numbers: dict):
    """`x [B, S, D]` of one microbatch → (`[B, S, D]`, metrics); `bias [E]` is for the choice, `real [B, S]`."""
    r, k, E = model["router"], model["experts_per_token"], model["num_experts"]
    B, S, D = x.shape
    h, is_real = normalised(xp, model, x, w, "moe.norm").reshape(B * S, D), real.reshape(-1)
    noise = jitter if isinstance(jitter, float) else jitter.reshape(B * S, D)
    routed = h * noise  # the experts get it without the noise
    logits = routed @ w["moe.router"]
    scores = softmax(xp, logits) if r["score_function"] == "softmax" else sigmoid(xp, logits)
    if "chosen" not in shared_numbers:  # from the values; the same for the gradient
        chosen = chosen_experts(model, np.asarray(scores) + bias) & is_real[:, None]
        shared_numbers["chosen"] = chosen
        plain: Any = {**model, "router": {**r, "num_groups": 1}}  # DeepSeek-V3, equation 18
        top = chosen_experts(plain, np.asarray(scores)) & is_real[:, None]
        shared_numbers["counted"] = top if r["loss_counts"] == "top_scores" else chosen
    chosen = shared_numbers["chosen"]
    if r["score_function"] == "softmax" and not r["pre_softmax"]:
        weights = softmax(xp, xp.where(chosen, logits, -1e30))
    else:
        weights = xp.where(chosen, scores, 0)
        if r["normalise"] and k > 1:
            weights = weights / xp.where(is_real, weights.sum(-1), 1)[:, None]
    weights = xp.where(chosen, weights, 0) * r["scaling_factor"]
    if "kept" not in shared_numbers:
        shared_numbers["kept"] = kept_assignments(model, chosen, np.asarray(weights), is_real)
    kept = shared_numbers["kept"]
    weights = xp.where(kept, weights, 0)
    y: Any = (weights.T[..., None] * feed_forward(xp, model, h, w, "moe.")).sum(0)  # of all experts `[E, T, D]`
    if model["shared_expert_ffn_hidden_size"]:
        shared = feed_forward(xp, model, h, w, "moe.shared_")
        gate = sigmoid(xp, h @ w["moe.shared_router"])[:, None] if model["shared_expert_gate"] else 1.0
        y = y + gate * shared

    probabilities = scores / scores.sum(-1, keepdims=True)
    tokens = is_real.sum()
    metrics = {
        "expert_counts": chosen.sum(0),
        "router_entropy": -(xp.where(is_real[:, None], probabilities * xp.log(probabilities), 0)).sum() / tokens,
    }
    if r["capacity_factor"] is not None:
        metrics["dropped_tokens"] = (chosen & ~kept).sum()
    counted = shared_numbers["counted"]
    aux, means = 0.0, xp.where(is_real[:, None], probabilities, 0)
    if r["global_loss"]:  # E · Σ_e (share of assignments) · (mean probability); 1 if balanced
        aux += r["global_loss"] * E * ((counted.sum(0) / (k * tokens)) * (means.sum(0) / tokens)).sum()
    if r["sequence_loss"]:  # the same of each sequence, and their mean
        lengths, by_sequence = real.sum(1), counted.reshape(B, S, E).sum(1)
        real_lengths = xp.maximum(lengths, 1)[:, None]
        own = E * ((by_sequence / (k * real_lengths)) * (means.reshape(B, S, E).sum(1) / real_lengths)).sum(1)
        aux += r["sequence_loss"] * own.sum() / (lengths > 0).sum()
    if r["global_loss"] or r["sequence_loss"]:
        metrics["aux_loss"] = aux
    if r["z_loss"]:
        metrics["router_z_loss"] = r["z_loss"] * xp.where(is_real, log_sum_exp(xp, logits) ** 2, 0).sum() / tokens
    return y.reshape(B, S, D), metrics


def block(xp, model: Options, w, bias, x, fields, draws, layer: int, m: int, numbers: dict, module: int | None = None):
    """A layer of microbatch m with its weights `w`, without the layers' axis; (x, metrics)."""
    own = lambda a: a if isinstance(a, float) else a[m]  # noqa: E731
    y, largest = attention(xp, model, w, x, fields["positions"], fields["documents"])
    x = x + own(draws.dropout(2 * layer + 1, module)) * y
    metrics = {"max_attention_score": largest}
    if "moe.router" in w:
        y, of_router = mixture(xp, model, w, bias, x, own(draws.jitter(layer)), fields["real"], numbers)
        metrics |= of_router
    else:
        y = feed_forward(xp, model, normalised(xp, model, x, w, "mlp.norm"), w, "mlp.")
    return x + own(draws.dropout(2 * layer + 2, module)) * y, metrics


def token_losses(xp, model: Options, weights, h, targets):
    """(−log p of each target, squared log-normaliser of each token), `h [B, S, D]` after the final norm."""
    head = weights["embedding.tokens"].T if model["tie_embeddings"] else weights["head"]
    logits = h @ head[:, : model["vocab_size"]]
    if model["logit_softcap"]:
        logits = model["logit_softcap"] * xp.tanh(logits / model["logit_softcap"])
    normaliser = log_sum_exp(xp, logits)
    is_target = targets[..., None] == np.arange(model["vocab_size"])
    return normaliser - xp.where(is_target, logits, 0).sum(-1), normaliser**2


def shifted(xp, a, documents, by: int):
    """`a [B, S]` of the token `by` places later; 0 where that is in another document or behind the end."""
    later = xp.where(documents[:, by:] == documents[:, :-by], a[:, by:], 0)
    return xp.concatenate([later, xp.zeros_like(a[:, :by])], 1)


def kinds(model: Options) -> list[str]:
    """The kind of each layer's block."""
    dense, every = model["first_dense_layers"], model["moe_layer_interval"]
    is_moe = [
        bool(model["num_experts"]) and i >= dense and (i - dense + 1) % every == 0 for i in range(model["num_layers"])
    ]
    return ["moe" if moe else "dense" for moe in is_moe]


def layer_weights(weights, kind: str, row: int) -> dict[str, Any]:
    prefix = f"blocks.{kind}."
    return {name.removeprefix(prefix): w[row] for name, w in weights.items() if name.startswith(prefix)}


def microbatch(xp, model: Options, weights, biases, fields, draws, m: int, numbers: list[dict]):
    """Microbatch m: (sums of losses over its tokens by name, metrics by layer)."""
    B, S = fields["tokens"].shape
    own = lambda a: a if isinstance(a, float) else a[m]  # noqa: E731
    x = weights["embedding.tokens"][fields["tokens"]]
    if "embedding.positions" in weights:
        x = x + weights["embedding.positions"][fields["positions"]]
    x = own(draws.dropout(0)) * x
    rows, metrics = {"dense": 0, "moe": 0}, []
    for layer, kind in enumerate(kinds(model)):
        w, bias = layer_weights(weights, kind, rows[kind]), biases[kind][rows[kind]] if kind in biases else 0.0
        x, measured = block(xp, model, w, bias, x, fields, draws, layer, m, numbers[layer])
        metrics.append(measured)
        rows[kind] += 1
    h = normalised(xp, model, x, weights, "final_norm")
    losses, squares = token_losses(xp, model, weights, h, fields["targets"])
    counted = fields["loss_mask"]
    sums = {"loss": (losses * counted).sum(), "z_loss": model["z_loss"] * (squares * counted).sum()}
    for module in range(model["mtp_layers"]):
        layer, w = model["num_layers"] + module, layer_weights(weights, "mtp", module)
        tokens = fields["targets"] if module == 0 else shifted(xp, fields["targets"], fields["documents"], module)
        embedded = own(draws.dropout(0, module)) * weights["embedding.tokens"][tokens]
        pair = [
            normalised(xp, model, embedded, w, "join.embedding_norm"),
            normalised(xp, model, h, w, "join.stream_norm"),
        ]
        bias = biases["mtp"][module] if "mtp" in biases else 0.0
        x, measured = block(
            xp,
            model,
            w,
            bias,
            xp.concatenate(pair, -1) @ w["join.projection"],
            fields,
            draws,
            layer,
            m,
            numbers[layer],
            module,
        )
        metrics.append(measured)
        h = normalised(xp, model, x, w, "final_norm")
        targets, mask = (shifted(xp, fields[n], fields["documents"], module + 1) for n in ("targets", "loss_mask"))
        own_losses, own_squares = token_losses(xp, model, weights, h, targets)
        sums[f"mtp_loss/{module}"] = (own_losses * mask).sum()
        sums[f"mtp_z_loss/{module}"] = model["z_loss"] * (own_squares * mask).sum()
    return sums, metrics


def counted_tokens(model: Options, fields: Arrays) -> dict[str, Any]:
    """The tokens that each mean loss is over, by its name."""
    counted = {"loss": max(fields["loss_mask"].sum(), 1)}
    for k in range(model["mtp_layers"]):
        pairs = zip(fields["loss_mask"], fields["documents"], strict=True)
        counted[f"mtp_loss/{k}"] = max(sum(shifted(np, mask, own, k + 1).sum() for mask, own in pairs), 1)
    return counted


def step(xp, model: Options, weights, batch: Arrays, draws, biases=None, numbers=None, counted=None, total_M=0):
    """(the number that the gradient is of, the logged numbers) of a batch `[M, B, S]`.

    Of some of a batch's microbatches with `counted` and `total_M` of the batch: their share of the first number.

    Losses are means over the counted tokens of all microbatches together. The routers' are means over the
    microbatches, summed over the layers; the entropy is a mean over both; counts are sums over the microbatches, by
    layer; of the largest score it is the maximum.
    """
    M = len(batch["tokens"])
    depth = model["mtp_layers"]
    numbers = [[{} for _ in range(model["num_layers"] + depth)] for _ in range(M)] if numbers is None else numbers
    full = np.zeros(batch["tokens"].shape, int)
    fields = {"documents": full, "real": full == 0, **batch}
    runs = [
        microbatch(xp, model, weights, biases or {}, {n: a[m] for n, a in fields.items()}, draws, m, numbers[m])
        for m in range(M)
    ]
    counted = counted or counted_tokens(model, fields)
    totals = {name: sum(sums[name] for sums, _ in runs) for name in runs[0][0]}
    logged: dict[str, Any] = {name: totals[name] / counted["loss"] for name in ("loss", "z_loss")}
    whole = logged["loss"] + logged["z_loss"]
    for k in range(depth):
        own = totals[f"mtp_loss/{k}"] / counted[f"mtp_loss/{k}"]
        whole += model["mtp_loss_weight"] / depth * (own + totals[f"mtp_z_loss/{k}"] / counted[f"mtp_loss/{k}"])
        logged["mtp_loss/module"] = [*logged.get("mtp_loss/module", []), own]
        logged["mtp_loss"] = sum(logged["mtp_loss/module"]) / depth
    of_layers = [metrics for _, metrics in runs]
    for name in ("aux_loss", "router_z_loss"):
        values = [metrics[name] for layers in of_layers for metrics in layers if name in metrics]
        if values:
            logged[name] = sum(values) / (total_M or M)
            whole += logged[name]
    layers = [[own[i] for own in of_layers if "expert_counts" in own[i]] for i in range(len(of_layers[0]))]
    layers = [own for own in layers if own]
    if layers:
        entropies = [metrics["router_entropy"] for own in layers for metrics in own]
        logged["router_entropy"] = sum(entropies) / len(entropies)
        for name in ("expert_counts", "dropped_tokens"):
            if name in layers[0][0]:
                logged[name] = xp.stack([sum(metrics[name] for metrics in own) for own in layers])
    largest = [metrics["max_attention_score"] for own in of_layers for metrics in own]
    logged["max_attention_score"] = xp.stack(largest).max()
    return whole, logged


def numbers_and_gradients(model: Options, weights: Arrays, batch: Arrays, draws, biases=None):
    """(the logged numbers in FP64 from NumPy, the gradient of every weight in FP64, of the same text by jax.grad)."""
    wide = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    depth = model["num_layers"] + model["mtp_layers"]
    choices = [[{} for _ in range(depth)] for _ in batch["tokens"]]  # made by NumPy; they have no gradient
    _, logged = step(np, model, wide, batch, draws, biases, choices)
    fields = {"documents": np.zeros(batch["tokens"].shape, int), "real": np.ones(batch["tokens"].shape, bool), **batch}
    counted, total_M = counted_tokens(model, fields), len(fields["tokens"])

    def share(w, fields, drawn, choices):
        return step(jnp, model, w, fields, draws.of(drawn), biases, choices, counted, total_M)[0]

    with jax.enable_x64(True):
        # One program, of one microbatch: operation by operation they would be hundreds.
        gradient, total = jax.jit(jax.grad(share)), dict[str, np.ndarray]()
        for m in range(total_M):
            own = jax.tree.map(lambda a, m=m: a[m : m + 1], (fields, draws.drawn))
            for name, g in gradient(wide, *own, choices[m : m + 1]).items():
                total[name] = total.get(name, 0) + np.asarray(g)
    return logged, total
