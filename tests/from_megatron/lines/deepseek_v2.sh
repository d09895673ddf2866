ROOT=.
source $ROOT/deepseek_v2_model.sh
torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}" --pipeline-model-parallel-size 4 \
 --expert-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 512 --train-iters 5000 --lr 2.4e-4 \
 --min-lr 2.4e-5 --lr-decay-style cosine --lr-warmup-iters 200 --mock-data --bf16
