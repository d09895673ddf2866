torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 48 --hidden-size 2048 --num-attention-heads 32 \
 --ffn-hidden-size 6144 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm \
 --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope \
 --rotary-base 1000000 --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 40960 \
 --hidden-dropout 0 --attention-dropout 0 --bf16 --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 \
 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-layer-freq 1 --moe-grouped-gemm \
 --expert-model-parallel-size 8 --context-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 \
 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --vocab-size 151936 --mock-data \
 --moe-router-dtype fp32 --recompute-granularity selective
