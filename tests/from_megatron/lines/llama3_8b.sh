#!/bin/bash
# Llama 3 8B
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CKPT=${1:-/ckpt}
STAMP=$(date +%s)
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr $(hostname) --master_port 6000)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-backend fused --apply-layernorm-1p
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
 --manual-gc --empty-unused-memory-level 1)
PARALLEL="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel"
DATA="--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2"
if [ -n "$FP8" ]; then
  TRAINING_ARGS+=(--fp8-format hybrid)
fi
torchrun ${DISTRIBUTED_ARGS[@]} \
    pretrain_gpt.py \
    ${MODEL_ARGS[@]} "${TRAINING_ARGS[@]}" $PARALLEL $DATA \
    --log-interval 1 --save "$CKPT" --save-interval 1000 --tensorboard-dir $STAMP/tb \
    --distributed-timeout-minutes 60 | tee log.txt
