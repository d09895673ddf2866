#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=128
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
MODEL=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 128 128 5859375
    --train-iters 500000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
    --fp16 --accumulate-allreduce-grads-in-fp32 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --lr-warmup-fraction .001 --lr-decay-iters 430000
)
PARALLEL=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL[@]} ${TRAINING[@]} ${PARALLEL[@]} \
    --tokenizer-type GPT2BPETokenizer --vocab-file v/vocab.json --merge-file v/merges.txt --mock-data --eval-iters 10
