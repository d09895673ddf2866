"""Token files, sample order, tokenizers, preprocessing and the loader; nothing here imports jax."""
