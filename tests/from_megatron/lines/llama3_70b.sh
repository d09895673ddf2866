export WORLD_SIZE=256
ARGS=$(cat flags.txt)
python pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --sequence-parallel \
 --num-virtual-stages-per-pipeline-rank 5 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \
 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
 --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear \
 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 1 \
 --global-batch-size 512 --train-iters 10000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 100 \
 --vocab-size 128256 --mock-data --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 \
 --use-distributed-optimizer --exit-interval 500 --exit-duration-in-mins 230
