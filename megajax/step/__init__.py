"""The step on one device: a graph of nodes, the stacks of layers, the pipeline."""
