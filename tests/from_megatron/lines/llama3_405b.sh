torchrun --nnodes 64 --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 \
 --num-layers-per-virtual-pipeline-stage 8 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
 --context-parallel-size 2 --sequence-parallel --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 \
 --num-attention-heads 128 --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
 --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear \
 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 1 \
 --global-batch-size 256 --train-iters 1000000 --lr 8e-5 --min-lr 8e-7 --lr-decay-style cosine --lr-warmup-iters 8000 \
 --vocab-size 128256 --weight-decay 0.1 --adam-beta2 0.95 --mock-data --fp8-format hybrid --fp8-recipe tensorwise \
 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer
