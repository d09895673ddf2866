"""With attention sinks and QK-clip cuDNN's call is part of an operation: remat policies keep the operation's result."""

import jax
import pytest

from megajax.config.checks import check_mesh
from megajax.kernel_choice import Kernels
from megajax.mesh import build_mesh
from megajax.tools.plan.compile import no_gpu_needed
from megajax.training.step import TrainProgram

MODEL = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 250}
MODEL |= {"block_pattern": ["attention"]}


SINKS, ONE_DEVICE = {"attention_sinks": True}, [("none", 1), ("save_matmuls", 1), ("offload", 1), ("selective", 2)]
CASES = [({}, SINKS, *case) for case in (*ONE_DEVICE, ("full", 2))]
CASES += [({"context": 2}, SINKS, "save_matmuls", 1), ({"context": 2}, SINKS, "selective", 2)]
CASES += [({}, {"qk_clip": 100.0}, "save_matmuls", 1), ({}, {}, "save_matmuls", 1), ({}, {}, "selective", 2)]


@pytest.mark.parametrize(("mesh", "changes", "policy", "forward"), CASES, ids=str)
def test_attention_runs_again_where_the_policy_says_so_alone(table, monkeypatch, policy, forward, mesh, changes):
    kernels = Kernels("cudnn")
    monkeypatch.setattr(Kernels, "choose", lambda *_: kernels)
    config = table.make_config(
        MODEL | changes,
        mesh,
        precision={"compute": "bfloat16"},
        communication={"context": "all_to_all"},
        remat={"policy": policy},
        optimizer="sgd",
    )
    count = mesh.get("context", 1)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    with no_gpu_needed():
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = text.count("@__cudnn$fmhaSoftmax("), text.count("@__cudnn$fmhaSoftmaxBackward(")
    assert calls == (forward, 1)
