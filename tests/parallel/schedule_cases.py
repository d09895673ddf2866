"""The sizes that tests of pipeline schedules go through."""

import itertools

from megajax.options.pipeline_schedules import KINDS

# (stages, microbatches, virtual stages): fewer and more microbatches than stages, whole groups with virtual stages
SIZES = [
    (P, M, R)
    for P, M, R in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 12, 16, 24), (1, 2, 3))
    if R == 1 or M % P == 0
]
CASES = list(itertools.product(KINDS, SIZES))
