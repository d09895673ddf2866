#!/usr/bin/env bash
set -euo pipefail
NNODES=${NNODES:-1}; GPUS=8
MICRO=2
GLOBAL=$((MICRO * GPUS * NNODES * 4))
ARGS=(
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 # 1.3B
  --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size "$MICRO" --global-batch-size "${GLOBAL}"
  --train-iters 143000 --lr 2.0e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 1430
  --bf16 --use-flash-attn --attention-dropout 0.0 --hidden-dropout 0.0
  --adam-beta2 0.95 --weight-decay 0.1
  --recompute-activations
)
python -m torch.distributed.run --nproc-per-node=$GPUS --nnodes=$NNODES --node-rank=${NODE_RANK:-0} \
  pretrain_gpt.py "${ARGS[@]}" --tokenizer-type GPT2BPETokenizer --data-path 0.3 data/books_text_document \
  0.7 data/web_text_document --split 98,2,0 --save-interval 1000 --no-save-optim --save checkpoints/gpt3-1.3b
