"""A trained model in use: logits, scores of texts and generated text, on any mesh.

Its programs are partitioned by XLA from the placement of the weights; only attention and experts are divided by hand.
"""
