mpirun -np 4 python pretrain_gpt.py --num-layers 18 --hidden-size 2048 --num-attention-heads 8 --kv-channels 256 \
 --group-query-attention --num-query-groups 1 --ffn-hidden-size 16384 --openai-gelu --disable-bias-linear \
 --normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope --seq-length 2048 \
 --max-position-embeddings 8192 --micro-batch-size 1 --train-iters 10 --lr 1e-4 --lr-decay-style linear --vocab-size \
 256000 --mock-data --seed 42 --deterministic-mode --log-interval 1 --optimizer lion --lion-beta1 0.9 --lion-beta2 0.99
