"""A weight from its declaration to its use, and its gradient on the way back: one chain, and a conversion on each edge.

    declared    shape, logical axes, role                          model/parameters.py
       |
    canonical   whole, the layers in the model's order: in checkpoints, in Hugging Face's format
       |        to_stored <-> to_canonical                         sharding.py
    stored      in shards over all axes that divide the batch, padded, the layers in the order of the stages:
       |        FP32, or a BF16 half with its low 16 bits          masters.py
       |        frozen weights in the compute dtype
       |
       |        fuse, cast or quantise, all-gather                 Weight.gather_per_step
       |        reduce-scatter of the gradient, sum over copies    Weight.reduce_per_step, complete, split
    per step    sharded over `fsdp` and `tensor`, in the compute dtype or in FP8
       |        all-gather, transpose in FP8                       Weight.gather_per_layer
       |        reduce-scatter of the gradient                     Weight.reduce_per_layer
    used        by a layer: an array, an `Fp8Weight`, or `Adapted` with its adapter (adapters.py)

The step composes the edges: `table.py` for weights outside the layers, `step/stack/stack_weights.py` for those of the
layers. `megajax explain-weight CONFIG NAME` traces them for one weight.
"""
