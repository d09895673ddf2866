# Sourced by deepseek_v2.sh.
MODEL=(--num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 128 --multi-latent-attention
  --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
  --norm-epsilon 1e-6 --num-experts 160 --moe-layer-freq "[0]*1+[1]*59" --moe-ffn-hidden-size 1536 --moe-router-topk 6
  --moe-router-num-groups 8 --moe-router-group-topk 3 --moe-shared-expert-intermediate-size 3072
  --moe-router-pre-softmax --moe-router-topk-scaling-factor 16.0 --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 0.003 --moe-grouped-gemm --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
  --untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 --hidden-dropout 0
  --attention-dropout 0 --vocab-size 102400)
