torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --kv-channels 64 \
 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --softmax-type learnable --window-size 127,0 \
 --window-attn-skip-freq 2 --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 \
 --normalization RMSNorm --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32 \
 --no-yarn-correction-range-round-to-int --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32 \
 --yarn-beta-slow 1 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-grouped-gemm \
 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.9 --untie-embeddings-and-output-weights \
 --expert-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 131072 --hidden-dropout 0 \
 --attention-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-5 --min-lr 1e-6 \
 --lr-decay-style cosine --vocab-size 201088 --mock-data
