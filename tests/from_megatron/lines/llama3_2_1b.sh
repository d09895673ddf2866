set -x
MODEL_SIZE=1B
case $MODEL_SIZE in
  1B) LAYERS=16; HIDDEN=2048; FFN=8192; HEADS=32 ;;
  3B) LAYERS=28; HIDDEN=3072; FFN=8192; HEADS=24 ;;
  *) echo unknown; exit 1 ;;
esac
cmd="torchrun --nproc_per_node=4 pretrain_gpt.py --num-layers ${LAYERS} --hidden-size ${HIDDEN} --ffn-hidden-size ${FFN} \
 --num-attention-heads ${HEADS} --group-query-attention --num-query-groups 8 --seq-length 4096 --kv-channels 64 \
 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 --use-rope-scaling \
 --rope-scaling-factor 32.0 --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 \
 --attention-dropout 0 --bf16 --micro-batch-size 2 --train-iters 20000 --lr 5e-4 --min-lr 5e-5 --lr-decay-style WSD \
 --lr-wsd-decay-iters 2000 --lr-warmup-iters 500 --vocab-size 128256 --mock-data"
echo $cmd
eval $cmd
