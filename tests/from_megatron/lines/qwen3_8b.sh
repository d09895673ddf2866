torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 36 --hidden-size 4096 --num-attention-heads 32 \
 --ffn-hidden-size 12288 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm \
 --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope \
 --rotary-base 1000000 --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 40960 \
 --hidden-dropout 0 --attention-dropout 0 --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy \
 optim_grads_params --ckpt-format fsdp_dtensor --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64 \
 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --vocab-size 151936 --mock-data \
 --no-gradient-accumulation-fusion
