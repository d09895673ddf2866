"""Options of the model that several tables of meshes are made with."""

# Two KV heads; alternating windows, and global layers without RoPE; all optional operations between the matmuls, as
# Gemma 2 and 3 have them and more.
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
    "rope_pattern": ["rope", "none"],
    "tie_embeddings": True,
    "z_loss": 1e-2,
    "norm_placement": "both",
    "norm_zero_centred": True,
    "scale_embeddings": True,
    "attention_scale": 0.25,
    "rope_local_theta": 500.0,
}
