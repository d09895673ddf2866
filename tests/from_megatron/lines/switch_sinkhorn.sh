python3 -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --num-layers 12 --hidden-size 768 \
 --num-attention-heads 12 --num-experts 16 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn \
 --moe-layer-freq 2 --disable-bias-linear --expert-model-parallel-size 4 --moe-token-dispatcher-type allgather \
 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 16 --train-iters 1000 \
 --lr 3e-4 --lr-decay-style inverse-square-root --lr-warmup-iters 100 --tokenizer-type NullTokenizer \
 --vocab-size 32000 --data-path d/c4 --optimizer sgd --sgd-momentum 0.8
