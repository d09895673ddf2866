"""The stack of blocks: its forward and backward pass, loops over layers, and residuals."""
