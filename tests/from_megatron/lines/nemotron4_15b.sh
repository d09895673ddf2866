torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 6144 --ffn-hidden-size 24576 \
 --num-attention-heads 48 --group-query-attention --num-query-groups 8 --squared-relu --apply-layernorm-1p \
 --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope --rotary-percent 0.5 \
 --no-position-embedding --hidden-dropout 0.0 --attention-dropout 0.0 --init-method-std 0.0134 --seq-length 4096 \
 --max-position-embeddings 4096 --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 4 \
 --train-samples 2442240 --lr-decay-samples 2421504 --lr-warmup-samples 20736 --lr 4.5e-4 \
 --min-lr 4.5e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --bf16 --vocab-size 256000 \
 --step-batch-size-schedule "0:384 1B:768 2B:1152" --mock-data --check-for-spiky-loss
