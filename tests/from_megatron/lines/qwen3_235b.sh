torchrun --nnodes 16 --nproc_per_node 8 pretrain_gpt.py --num-layers 94 --hidden-size 4096 --num-attention-heads 64 \
 --ffn-hidden-size 12288 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm \
 --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope \
 --rotary-base 5000000 --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 40960 \
 --hidden-dropout 0 --attention-dropout 0 --bf16 --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8 \
 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm --expert-model-parallel-size 8 \
 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 \
 --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11 --micro-batch-size 1 \
 --global-batch-size 256 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --vocab-size 151936 --mock-data
