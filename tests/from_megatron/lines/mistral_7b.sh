torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --window-size "(4095,0)" --swiglu \
 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-seq-len-interpolation-factor 2 \
 --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 32768 --hidden-dropout 0 \
 --attention-dropout 0 --bf16 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 1e-5 --min-lr 1e-6 \
 --lr-decay-style cosine --padded-vocab-size 32768 --per-split-data-args-path split.json --log-params-norm \
 --wandb-project p --wandb-exp-name mistral --tensorboard-dir tb --profile --profile-step-start 20 --profile-step-end 23
