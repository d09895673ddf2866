"""Launch lines of small models, for tests to add flags to."""

DENSE: str = """--num-layers 4 --hidden-size 400 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 --vocab-size 1000
    --position-embedding-type rope --mock-data --swiglu --disable-bias-linear"""
EXPERTS: str = f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss"
FILES: str = DENSE.replace("--mock-data", "")
LATENT: str = f"{DENSE} --multi-latent-attention --qk-layernorm --q-lora-rank 32 --norm-epsilon 1e-6"
MUON: str = f"{DENSE} --optimizer muon --muon-extra-scale-factor 0.2"
