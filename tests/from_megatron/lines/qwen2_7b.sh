MODEL_SIZE=${1:-7B}
if [ $MODEL_SIZE = 0.5B ]; then
  L=24; H=896; HEADS=14; FFN=4864; KV=2
elif [ $MODEL_SIZE = 7B ]; then
  L=28; H=3584; HEADS=28; FFN=18944; KV=4
fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $L --hidden-size $H --num-attention-heads $HEADS \
 --ffn-hidden-size $FFN --group-query-attention --num-query-groups $KV --add-qkv-bias --disable-bias-linear --swiglu \
 --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000 \
 --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 131072 --hidden-dropout 0 \
 --attention-dropout 0 --bf16 --tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 1 \
 --global-batch-size 16 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 100 \
 --vocab-size 152064 --make-vocab-size-divisible-by 1 --data-path d/qwen
