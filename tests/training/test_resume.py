"""Runs that were killed, stopped or moved to another mesh go on as if nothing had happened."""

import shutil
import threading
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src.compilation_cache import compress_executable, decompress_executable
from jax._src.lru_cache import LRUCache
from several_processes import clusters, together

from megajax.errors import InputError
from megajax.optim import slot_files
from megajax.training.compiled_steps import are_shared, compiled, remove_damaged_programs
from megajax.training.loop import Trainer


def run_on(config, sizes: dict[str, int]) -> None:
    """Train to the end on a mesh of the first devices."""
    devices = 1
    for size in sizes.values():
        devices *= size
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    assert Trainer(config, jax.devices()[:devices]).run() == 0


EMA = "ema_eval_loss"
LONG = ("run.steps=4", "run.checkpoint_interval=2", "run.eval_steps=1", "data.split='8,2,0'")
# A width of 36 needs padding on 8 storage shards.
WIDTH = ("model.hidden_size=36", "model.head_dim=8", "model.num_layers=1", "model.activation=gelu")


def test_a_run_saved_on_one_mesh_goes_on_on_another(tmp_path, make_config, read_metrics, monkeypatch):
    """Also with optimizer state in files, of which a checkpoint knows nothing."""
    # Where the tests' files are. Not by setattr, which would keep other tests' programs away (reused_programs.py).
    monkeypatch.setitem(vars(slot_files), "IN_MEMORY", ())

    def config(run_dir, offload, *more):
        run_dir = tmp_path / run_dir
        muon = ("optimizer.kind=muon", "optimizer.state=int8", "optimizer.ema_decay=0.3")  # with AdamW's state too
        return make_config(*WIDTH, *muon, f"run.dir={run_dir}", f"optimizer.offload={offload}", *LONG, *more)

    in_files = f"optimizer.offload_dir={tmp_path}"
    run_on(config("whole", 1), {"data": 2, "tensor": 2})
    expected, averaged = (read_metrics(tmp_path / "whole", *names) for names in (("loss", "grad_norm"), (EMA,)))
    [(step, evaluated)] = averaged.items()
    assert step == 4 and evaluated != read_metrics(tmp_path / "whole", "eval_loss")[4]
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "whole", other)
    shutil.rmtree(other / "checkpoints" / "4")
    (other / "metrics.jsonl").unlink()
    run_on(config("other", 0.5, in_files), {"fsdp": 8})
    numbers = read_metrics(other, "loss", "grad_norm")
    assert list(numbers) == [3, 4]
    for step, values in numbers.items():
        assert values == pytest.approx(expected[step], rel=1e-5), step
    assert read_metrics(other, EMA)[4] == pytest.approx(evaluated, rel=1e-5)
    # The checkpoint of the files, without them.
    host, files = (Trainer(config("other", 1, *more), jax.devices()[:1]) for more in ((), (in_files,)))
    found = files.program.with_files(files.state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(host.state), strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(jax.tree.leaves(files.state)) < len(jax.tree.leaves(found))


@pytest.mark.long
def test_an_average_of_the_weights_may_begin_at_a_checkpoint_but_not_end(tmp_path, make_config, read_metrics):
    def config(*overrides):
        return make_config(*WIDTH, f"run.dir={tmp_path}", *overrides)

    run_on(config("run.steps=2"), {"fsdp": 8})
    trainer = Trainer(config("run.steps=3", "optimizer.ema_decay=0.5"), jax.devices()[:1])
    before, share = {name: np.asarray(w) for name, w in trainer.state.params.items()}, 1 - 4 / 13  # of step 3
    assert trainer.run() == 0
    for name, average in trainer.state.ema.items():
        expected = before[name] + share * (np.asarray(trainer.state.params[name]) - before[name])
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7, err_msg=name)
    with pytest.raises(InputError, match="has averages of the weights, but optimizer.ema_decay=null"):
        Trainer(config("run.steps=4"), jax.devices()[:1])


def test_the_newest_checkpoints_and_each_kth_are_kept(tmp_path, make_config, checkpoint_steps):
    run_on(
        make_config(
            f"run.dir={tmp_path}",
            "run.steps=8",
            "run.checkpoint_interval=1",
            "checkpoint.keep=2",
            "checkpoint.keep_every=3",
        ),
        {},
    )
    assert checkpoint_steps(tmp_path) == [3, 6, 7, 8]


@pytest.mark.parametrize(
    "change", ["run.seed=5", "optimizer.kind=lion", "optimizer.state=int8", "batch.sequence_length=8"]
)
def test_a_run_does_not_go_on_as_another_one(tmp_path, make_config, change):
    run_on(make_config(f"run.dir={tmp_path}", "run.steps=1"), {})
    key, value = change.split("=")
    with pytest.raises(InputError, match=f"{key}=.* {value}"):
        Trainer(make_config(f"run.dir={tmp_path}", "run.steps=2", change), jax.devices()[:1])


@pytest.fixture
def cache(request):
    """The cache of compiled programs, or none."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before if request.param else None)
    yield request.param
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(("cache", "deterministic"), [(True, False), (True, True), (False, False)], indirect=["cache"])
def test_process_0_compiles_before_those_that_share_its_cache(make_config, cache, deterministic):
    """The processes of a deterministic run have a cache each."""
    alone = deterministic or not cache
    ended, other_ended = [], threading.Event()

    def compile_in(rank: int, *_: object) -> None:
        if rank == 0:
            other_ended.wait(10 if alone else 0.05)
        ended.append(rank)
        if rank == 1:
            other_ended.set()

    def run(rank: int) -> None:
        shared = are_shared(make_config(f"run.deterministic={deterministic}".lower()))
        compiled(SimpleNamespace(compile=partial(compile_in, rank)), "step of 8", shared)

    with together(clusters(2)) as call:
        assert call(run) == [None, None]
    assert ended == ([1, 0] if alone else [0, 1])


def test_files_of_the_cache_that_are_no_programs_are_removed_and_all_others_stay(tmp_path, make_config):
    """Under the names that jax gives and looks for."""
    cache, whole = LRUCache(str(tmp_path), max_size=-1), compress_executable(b"a program" * 99)
    files = {"whole": whole, "cut": whole[:-9], "empty": b"", "text": b"no program"}
    for name, content in files.items():
        cache.put(name, content)
    (tmp_path / "notes").touch()
    remove_damaged_programs(make_config(f"run.compilation_cache={tmp_path}"))
    assert [name for name in files if cache.get(name) is not None] == ["whole"]
    assert (tmp_path / "notes").exists()


@pytest.mark.long
def test_a_restart_reads_its_compiled_step_and_replaces_a_damaged_one(tmp_path, start):
    short = ("run.steps=2", "run.checkpoint_interval=1", "run.eval_steps=0", f"run.dir={tmp_path / 'run'}")
    cache = tmp_path / "run" / "compilation_cache"
    first = start(*short, JAX_COMPILATION_CACHE_DIR="")
    assert first.finish() == 0, first.output
    (kept,) = cache.glob("jit__train_step-*")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])  # as if the process had been killed while it wrote

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    again = start(*short, JAX_COMPILATION_CACHE_DIR="")
    assert again.finish() == 0, again.output
    assert "cache" not in again.output
    assert decompress_executable(kept.read_bytes())
    # Nothing was compiled twice: the program of the restart has the name of the first one.
    assert list(cache.glob("jit__train_step-*")) == [kept]
