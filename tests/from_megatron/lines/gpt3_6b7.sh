#!/bin/bash
#SBATCH --job-name=gpt3
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
run_cmd="pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel --num-layers 32 --hidden-size 4096 \
 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \
 --global-batch-size 1024 --train-samples 1024000 --lr-decay-samples 1000448 --lr-warmup-samples 10240 \
 --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style linear --vocab-size 50257 --tokenizer-type GPT2BPETokenizer \
 --data-path /data/pile/a /data/pile/b /data/pile/c --bf16 --attention-dropout 0 --hidden-dropout 0 \
 --recompute-granularity full --recompute-method block --recompute-num-layers 8 --optimizer adam"
srun --output=log.txt python -u ${run_cmd}
