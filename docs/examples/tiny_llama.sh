#!/bin/bash
# A tiny Llama of Megatron-LM, in FP32, on the text of megajax's documentation: docs/migration.md.
MODEL=(
  --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
  --ffn-hidden-size 384 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
  --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
  --seq-length 128 --max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 257
)
TRAINING=(
  --micro-batch-size 4 --global-batch-size 16 --train-iters 100 --lr 1e-3 --min-lr 1e-4
  --lr-decay-style cosine --lr-warmup-iters 10 --adam-beta2 0.95 --weight-decay 0.1 --log-interval 1 --eval-iters 0
)
torchrun --nproc-per-node 1 pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" \
  --data-path docs_text_document --split 95,5,0 --load start --finetune --save run --save-interval 100
