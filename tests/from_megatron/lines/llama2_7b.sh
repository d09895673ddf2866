#!/bin/bash
TP=${TP:-2} ; PP=${PP:-1} ; GPUS_PER_NODE=8
: "${TOKENIZER:=/tok/tokenizer.model}"
if [ "$TP" -gt 1 ]; then SP="--sequence-parallel"; else SP=""; fi
CMD="--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP $SP
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
  --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm --norm-epsilon 1e-5
  --position-embedding-type rope --no-position-embedding --swiglu --untie-embeddings-and-output-weights
  --disable-bias-linear --no-masked-softmax-fusion --attention-dropout 0 --hidden-dropout 0 --use-flash-attn
  --micro-batch-size 2 --global-batch-size 256 --train-iters 50000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
  --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
  --tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER --vocab-size 32000 --data-path data/rp_text_document
  --split 990,9,1 --eval-iters 20 --eval-interval 500 --save ckpt/llama2 --load ckpt/llama2 --save-interval 500"
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py $CMD
