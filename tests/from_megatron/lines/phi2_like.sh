torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \
 --max-position-embeddings 256 --position-embedding-type rope --rotary-percent 0.5 --qk-layernorm --micro-batch-size 4 \
 --global-batch-size 32 --train-iters 100 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 \
 --vocab-size 51200 --no-bias-gelu-fusion --untie-embeddings-and-output-weights --data-path d/text --split 1,0,0 \
 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /dev/shm/x --non-persistent-save-interval 10 \
 --save out --save-interval 50 --save-retain-interval 100
