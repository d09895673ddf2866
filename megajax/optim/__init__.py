"""Optimizers and learning rate schedules."""

from megajax.optim.optimizer import make_optimizer
from megajax.optim.schedule import make_schedule

__all__ = ["make_optimizer", "make_schedule"]
