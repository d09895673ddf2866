#!/bin/bash
DTYPE=${DTYPE:-"fp8"}
TRAIN="--micro-batch-size 1 --global-batch-size 128 --train-iters 2000 --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine
  --bf16 --weight-decay 0.1 --adam-beta2 0.95"
if [[ "$DTYPE" == "fp8" ]]; then
    TRAIN+=" --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
fi
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
  --rotary-base 1000000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --hidden-dropout 0 --attention-dropout 0"
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL $TRAIN --tensor-model-parallel-size 1 --context-parallel-size 2 \
  --cp-comm-type a2a --use-distributed-optimizer --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
