NGPU=16
launch() {
  local nodes=$1; shift
  torchrun --nnodes $nodes --nproc-per-node 8 pretrain_gpt.py "$@"
}
launch $((NGPU / 8)) --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 \
  --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0 --swiglu \
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 \
  --attention-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 1e-5 --min-lr 0 \
  --lr-decay-style cosine --lr-warmup-iters 50 --vocab-size 128256 --data-path sft/a sft/b --tokenizer-type \
  HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B --reset-position-ids --reset-attention-mask \
  --eod-mask-loss --calculate-per-token-loss --load /ckpts/llama-3.1 --save out --save-interval 250 --no-load-optim \
  --no-load-rng --finetune
