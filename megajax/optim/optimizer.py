"""The update direction; the step multiplies it by the learning rate."""

from collections.abc import Mapping

import optax

from megajax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, roles: Mapping[str, str]) -> optax.GradientTransformation:
    """Gradients by name → directions by name, decoupled weight decay included.

    `roles` are the parameters' roles (`model.parameters.ROLES`); weight decay depends on them. AdamW is
    Loshchilov and Hutter 2019, Lion is Chen et al. 2023, SGD is heavy-ball momentum.
    """
    direction = {
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        "lion": lambda: optax.scale_by_lion(config.beta1, config.beta2),
        "sgd": lambda: optax.trace(config.beta1) if config.beta1 > 0 else optax.identity(),
    }[config.kind]()
    decayed = {
        "matrix": True,
        "embedding": config.decay_embeddings,
        "norm": config.decay_norms,
        "bias": config.decay_biases,
    }
    mask = {name: decayed[role] for name, role in roles.items()}
    return optax.chain(direction, optax.add_decayed_weights(config.weight_decay, mask))
