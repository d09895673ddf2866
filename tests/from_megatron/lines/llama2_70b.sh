#!/bin/bash
NNODES=8
GPUS=8
OPTIONS=" \
    --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 4 \
    --num-layers-per-virtual-pipeline-stage 5 \
    --sequence-parallel "
OPTIONS+="--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
OPTIONS+="--normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
OPTIONS="$OPTIONS --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0 --bf16"
srun -N $NNODES torchrun --nnodes $NNODES --nproc_per_node $GPUS --rdzv_backend c10d pretrain_gpt.py $OPTIONS \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 100000 --lr 1.5e-4 --min-lr 1.5e-5 \
    --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --vocab-size 32000 \
    --make-vocab-size-divisible-by 1 --train-data-path d/train --valid-data-path d/valid --test-data-path d/test \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 2>&1 | tee log
