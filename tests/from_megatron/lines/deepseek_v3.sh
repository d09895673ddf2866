#!/bin/bash
MODEL_ARGS=(--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
  --v-head-dim 128 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 10000 --rotary-scaling-factor 40 --mscale 1.0
  --mscale-all-dim 1.0 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02)
MOE_ARGS=(--num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
  --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 1e-4 --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep
  --moe-permute-fusion --moe-shared-expert-overlap)
torchrun --nnodes 32 --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" --mtp-num-layers 1 \
  --mtp-loss-scaling-factor 0.3 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 \
  --pipeline-model-parallel-layout "Et*3|(tt|)*29m|L" --expert-tensor-parallel-size 1 --seq-length 4096 \
  --max-position-embeddings 163840 --micro-batch-size 1 --global-batch-size 2048 --train-samples 585937500 \
  --lr-warmup-samples 1536000 --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 \
  --bf16 --use-precision-aware-optimizer --main-grads-dtype fp32 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 \
  --recompute-granularity selective --recompute-modules mla_up_proj moe_act layernorm --vocab-size 129280 --mock-data
