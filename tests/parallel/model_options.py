"""Options of the model that several tables of meshes are made with."""

# Two KV heads; alternating windows; all optional operations between the matmuls.
GEMMA = {
    "num_kv_heads": 2,
    "activation": "geglu",
    "qk_norm": True,
    "rope_fraction": 0.5,
    "logit_softcap": 3.0,
    "attention_softcap": 2.0,
    "attention_sinks": True,
    "sliding_window": 5,
    "layer_pattern": ["local", "global"],
    "tie_embeddings": True,
    "z_loss": 1e-2,
}
