srun -N 16 --ntasks-per-node 8 bash -c "python -u pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel \
 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 14 --expert-model-parallel-size 8 \
 --expert-tensor-parallel-size 1 --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 \
 --group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-3 \
 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --moe-grouped-gemm \
 --moe-token-dispatcher-type alltoall --seq-length 4096 --max-position-embeddings 65536 --position-embedding-type rope \
 --rotary-base 1000000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
 --hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 \
 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --vocab-size 32000 --mock-data"
