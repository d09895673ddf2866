torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py --num-layers 40 --hidden-size 6144 --num-attention-heads 48 \
 --group-query-attention --num-query-groups 1 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 \
 --global-batch-size 512 --train-iters 250000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
 --init-method-std 0.01275 --adam-beta2 0.95 --weight-decay 0.1 --hidden-dropout 0.1 --attention-dropout 0.1 --bf16 \
 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --fim-data --fim-rate 0.5 --fim-spm-rate 0.5 \
 --tokenizer-type HuggingFaceTokenizer --tokenizer-model /tok/starcoder --vocab-size 49152 --data-path d/code \
 --split 969,30,1 --decoupled-lr 6e-4 --decoupled-min-lr 6e-5
