"""SOAP in plain NumPy, matrix by matrix in float64, from the paper (Vyas et al. 2024) and its authors' code."""

from collections.abc import Mapping, Sequence

import numpy as np
from muon import array_of, is_matrix, matrices


class AdamW:
    """The update of a parameter that has no matrices."""

    def __init__(self, shape: Sequence[int], beta1: float, beta2: float, epsilon: float):
        self.epsilon = epsilon
        self.betas, self.mean, self.square = (beta1, beta2), np.zeros(shape), np.zeros(shape)

    def __call__(self, gradient: np.ndarray, t: int) -> np.ndarray:
        beta1, beta2 = self.betas
        self.mean = beta1 * self.mean + (1 - beta1) * gradient
        self.square = beta2 * self.square + (1 - beta2) * gradient**2
        return self.mean / (1 - beta1**t) / (np.sqrt(self.square / (1 - beta2**t)) + self.epsilon)


class Soap:
    """The update of one matrix; a side that is longer than `largest` keeps the identity as its basis."""

    def __init__(self, shape: Sequence[int], beta1: float, beta2: float, epsilon: float, frequency: int, largest: int):
        self.epsilon = epsilon
        self.betas, self.frequency, self.adapts = (beta1, beta2), frequency, [size <= largest for size in shape]
        self.mean, self.square = np.zeros(shape), np.zeros(shape)
        self.factors, self.bases = [np.zeros((size, size)) for size in shape], [np.eye(size) for size in shape]

    def __call__(self, gradient: np.ndarray, t: int) -> np.ndarray:
        (beta1, beta2), (left, right) = self.betas, self.bases
        update, n = np.zeros_like(gradient), t - 1
        if n > 0:
            self.mean = beta1 * self.mean + (1 - beta1) * gradient
            self.square = beta2 * self.square + (1 - beta2) * (left.T @ gradient @ right) ** 2
            mean, square = self.mean / (1 - beta1**n), self.square / (1 - beta2**n)
            update = left @ ((left.T @ mean @ right) / (np.sqrt(square) + self.epsilon)) @ right.T
        for side, outer in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            if not self.adapts[side]:
                continue
            factor = self.factors[side] = beta2 * self.factors[side] + (1 - beta2) * outer
            if n == 0:
                self.bases[side] = eigenbasis(factor)
            elif n % self.frequency == 0:
                basis = self.bases[side]
                order = np.argsort(-np.diag(basis.T @ factor @ basis))
                self.bases[side], _ = np.linalg.qr(factor @ basis[:, order])
                self.square = self.square.take(order, axis=side)
        return update


def eigenbasis(factor: np.ndarray) -> np.ndarray:
    """Eigenvectors by falling eigenvalues, then unit vectors made orthogonal to those before (Gram–Schmidt)."""
    values, vectors = np.linalg.eigh(factor)
    found = [v for value, v in zip(values[::-1], vectors.T[::-1], strict=True) if value > values[-1] * 1e-6]
    for unit in np.eye(len(factor))[: len(factor) - len(found)]:
        for _ in range(2):
            unit = unit - sum(v * (v @ unit) for v in found)
        found.append(unit / np.linalg.norm(unit))
    return np.array(found).T


def reference(
    weights: Mapping[str, np.ndarray], gradients: Sequence[Mapping[str, np.ndarray]], rate: float, **settings
) -> dict[str, np.ndarray]:
    """The weights after a step with each of the gradients; weight decay 0.1 of all but norms and biases."""
    found, beta1, beta2 = {}, settings["beta1"], settings["beta2"]
    for name, weight in weights.items():
        weight, decay = weight.astype(np.float64), 0.0 if name.endswith(("norm", "bias")) else 0.1
        stack = matrices(name, weight)
        if is_matrix(name):
            updates = {index: Soap(stack.shape[-2:], **settings) for index in np.ndindex(stack.shape[:-2])}
        else:
            updates, stack = {(): AdamW(weight.shape, beta1, beta2, settings["epsilon"])}, weight
        for t, each in enumerate(gradients, start=1):
            own = matrices(name, each[name]) if is_matrix(name) else each[name]
            update = np.empty(stack.shape)
            for index, one in updates.items():
                update[index] = one(own[index].astype(np.float64), t)
            update = array_of(name, update, weight) if is_matrix(name) else update
            weight = weight - rate * (update + decay * weight)
        found[name] = weight
    return found
