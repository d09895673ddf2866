torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 28 --hidden-size 1024 --num-attention-heads 16 \
 --ffn-hidden-size 3072 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm \
 --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings \
 --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 40960 --hidden-dropout 0 --attention-dropout 0 \
 --bf16 --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 64 \
 --train-iters 1000 --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 20 --vocab-size 151936 --mock-data \
 --optimizer muon --muon-momentum 0.95 --muon-scale-mode spectral --muon-extra-scale-factor 0.2 --ckpt-format torch_dist \
 --no-gradient-accumulation-fusion
