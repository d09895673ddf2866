torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 \
 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --no-rope-freq 4 --position-embedding-type rope \
 --rotary-base 2000000 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --seq-length 4096 \
 --max-position-embeddings 65536 --hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 2 \
 --global-batch-size 64 --train-iters 6000 --lr 2e-4 --min-lr 0 --lr-decay-style WSD --lr-wsd-decay-style linear \
 --lr-wsd-decay-iters 600 --lr-warmup-iters 200 --vocab-size 128256 --mock-data --reset-attention-mask
