"""megajax preflight --rates: fits recover known rates, programs compute what they count, the plan reads the file."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from megajax.kernel_choice import Hardware
from megajax.tools.plan.rates import H200, rates_of_kind, read_rates
from megajax.tools.preflight import __main__ as command
from megajax.tools.preflight import measurements, rates
from megajax.tools.preflight.fits import Timing, linear_rate, saturating_rate, shared_half
from megajax.tools.preflight.measurements import DeviceGroup
from megajax.tools.preflight.programs import COPY, MATMUL, ON_CPUS, Sizes, attention_kind, programs, random_arguments


def saturating(rate, half, sizes=(512, 2048, 8192)):
    return [Timing("", n, n**2, n**2 * (n + half) / (rate * n)) for n in sizes]


def test_fits_recover_the_rates_that_made_the_times():
    assert saturating_rate(saturating(7e14, 280)) == pytest.approx((7e14, 280))
    times = [Timing("", 0, work, 3e-5 + work / 2e11) for work in (1e6, 1e7, 1e9)]
    assert linear_rate(times) == pytest.approx((2e11, 3e-5))
    found, half = shared_half({64: saturating(3e14, 800), 128: saturating(5e14, 800)})
    assert (found[64], found[128], half) == pytest.approx((3e14, 5e14, 800))
    kinds = {width: saturating(3e14, half) for width, half in ((64, 900), (128, 200), (256, 100))}
    rates, half = shared_half(kinds)
    assert half == pytest.approx(200)  # their median

    def error(rate):
        """The sum of squared relative errors of the times of width 64 with the shared half."""
        return sum((t.work * (1 + 200 / t.size) / rate / t.seconds - 1) ** 2 for t in kinds[64])

    assert error(rates[64]) < min(error(0.99 * rates[64]), error(1.01 * rates[64]))
    noise = np.random.default_rng(0).normal(1, 0.01, 5)
    noisy = saturating(7e14, 280, (512, 1024, 2048, 4096, 8192))
    noisy = [t._replace(seconds=t.seconds * factor) for t, factor in zip(noisy, noise, strict=True)]
    assert saturating_rate(noisy).rate == pytest.approx(7e14, rel=0.05)


def test_times_that_follow_no_rate_give_the_best_one():
    falling = [Timing("", n, n, n**2 / 1e12) for n in (1, 2, 4)]
    assert saturating_rate(falling) == (1e12, 1)
    assert linear_rate(falling) == (1e12, 0)
    assert saturating_rate(falling[:1]) == (1e12, 1)


TINY = Sizes(8, (4,), 8, (4,), 4, 64, (1,), 0.0)


def test_programs_compute_what_they_count():
    bf16, fp32, fp8, *attention, copy = programs(TINY, Hardware("cpu"))
    assert str(jax.make_jaxpr(fp32.function)(fp32.arguments)).count("HIGHEST, Precision.HIGHEST") == 3  # not TF32
    for program in (bf16, fp32, fp8):
        arrays, factor = random_arguments(program), 1.0
        x, w, dy = (np.asarray(arrays[i], np.float32) for i in ((0, 1, 4) if program is fp8 else (0, 1, 2)))
        if program is fp8:  # a tensor is quantised with its transpose
            arrays, factor = (
                (*arrays[:2], arrays[0].T, arrays[1].T, arrays[4], arrays[4].T, arrays[6]),
                float(arrays[6]),
            )
        for ours, expected in zip(program.function(arrays), (x @ w, dy @ w.T, x.T @ dy), strict=True):
            np.testing.assert_allclose(np.asarray(ours, np.float32), factor * expected, rtol=0.02, atol=0.05)
        assert program.work == 2 * (8 * 4 * 8) * 3 and (x.shape, w.shape) == ((8, 4), (4, 8))
    assert [program.kind for program in attention] == [attention_kind(width) for width in (64, 128, 192, 256)]
    [out, (dq, dk, dv)] = jax.eval_shape(attention[2].function, attention[2].arguments)
    assert (out.shape, dq.shape, dk.shape, dv.shape) == ((2, 4, 4, 128), (2, 4, 4, 192), (2, 4, 4, 192), (2, 4, 4, 128))
    # Two sequences of 4 tokens, half of 16 pairs, four heads: scores and values forward, twice that backward.
    assert attention[2].work == 3 * (2 * 8 * 4 * 2 * (192 + 128))
    assert copy.work == 2 * copy.arguments[0].size * 2
    old = Hardware("gpu", "8.0")  # no FP8, cuDNN's attention with equal widths up to 128
    kinds = {program.kind for program in programs(TINY, old)}
    assert MATMUL[True] not in kinds and {MATMUL[False], attention_kind(128), COPY} <= kinds


def test_groups_of_links_grow_to_all_devices():
    devices = [SimpleNamespace(id=i, process_index=i // 6) for i in range(18)]
    found = [(group.kind, [d.id for d in group.devices]) for group in rates.link_groups(devices, ["a", "b", "c"])]
    assert found[:3] == [(f"within a host ({n})", list(range(n))) for n in (2, 4, 6)]
    assert found[9:] == [("between hosts (2)", [0, 6]), ("between hosts (3)", [0, 6, 12])]
    assert rates.link_groups(devices[:1], ["a"]) == []


KNOWN = replace(
    H200,
    name="cpu",
    bf16_flops=6e14,
    bf16_half_rate=200.0,
    fp32_flops=5e13,
    fp8_half_rate=500.0,
    attention_half_rate=700.0,
    memory_bytes=4e12,
    link_bytes=3e11,
    nccl_bytes=2e11,
    hosts_of=8,
)


def known_timing(program, sizes) -> Timing:
    """The time of a program on a GPU with the rates KNOWN."""
    width = next((width for width, _ in KNOWN.attention_flops if program.kind == attention_kind(width)), None)
    if width is not None:
        rate = KNOWN.attention(width, program.size)
    elif "FP32" in program.kind:
        rate = KNOWN.in_fp32.matmul_flops(program.size, fp8=False)
    else:
        rate = KNOWN.memory_bytes if program.kind == COPY else KNOWN.matmul_flops(program.size, "FP8" in program.kind)
    return Timing(program.kind, program.size, program.work, program.work / rate)


def known_links(group: DeviceGroup, sizes) -> list[Timing]:
    """A smaller group is slower, so that the largest one is recognised."""
    found, part = [], len(group.devices) / 8
    for operation in rates.LINKS:
        rate = part * (KNOWN.link_bytes if operation == "permute" else KNOWN.nccl_bytes)
        work = [measurements.sent_bytes(operation, len(group.devices), size * 2**20) for size in sizes.megabytes]
        found += [Timing(f"{operation} {group.kind}", 0, each, 2e-5 + each / rate) for each in work]
    return found


def test_the_report_shows_rates_at_the_sizes_that_it_names():
    """By hand: rate · size / (size + half)."""
    own = replace(KNOWN, attention_flops=((64, 3e14), (128, 4e14), (192, 5e14), (256, 6e14)), fp8_flops=1.5e15)
    found = {figure.what: str(figure) for figure in rates.figures(replace(own, network_bytes=4e10))}
    matmuls = {
        (n, name): r * n / (n + h) for n in (1024, 8192) for name, r, h in (("BF16", 6e14, 200), ("FP8", 1.5e15, 500))
    }
    expected = {f"matmul {name}, smallest dimension {n}": rate for (n, name), rate in matmuls.items()}
    attention = {width: rate * 8192 / (8192 + 700) for width, rate in own.attention_flops}
    expected |= {f"attention over 8192 tokens, heads of {width}": rate for width, rate in attention.items()}
    others = {
        "copy in memory": "4000",
        "copies between GPUs of a host": "300",
        "gathers and reductions in a host": "200",
    }
    others |= {"gathers and reductions between hosts": "40"}
    shown = {what: f"{rate / 1e12:.0f} TFLOP/s" for what, rate in expected.items()}
    assert found == shown | {what: f"{rate} GB/s" for what, rate in others.items()}


def test_the_plan_reads_the_file_of_the_command(tmp_path, capsys):
    file = tmp_path / "rates.json"
    timings = [known_timing(program, ON_CPUS) for program in programs(ON_CPUS, Hardware("cpu"))]
    for group in rates.link_groups(jax.devices(), ["a"]):
        timings += known_links(group, ON_CPUS)
    table = rates.finish(file, rates.Machine("cpu", 8, 1), [rates.Answer(timings, None)])
    read = read_rates(file, H200)
    assert dict(read.attention_flops) == pytest.approx(dict(KNOWN.attention_flops))
    assert read.attention_half_rate == pytest.approx(KNOWN.attention_half_rate)
    for name in "bf16_flops bf16_half_rate fp8_flops fp8_half_rate fp32_flops memory_bytes link_bytes".split():
        assert getattr(read, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert (read.nccl_bytes, read.hosts_of, read.name) == (pytest.approx(2e11, rel=1e-6), 8, "cpu")
    notes = json.loads(file.read_text())["measured"]
    assert (notes["device"], notes["devices"], notes["hosts"], notes["jax"]) == ("cpu", 8, 1, jax.__version__)
    assert notes["not_measured"] == ["memory_gib", "peak_flops", "network_bytes"]
    assert ["permute", "within", "a", "host", "(8)", "300", "20"] in [line.split() for line in table.splitlines()]
    assert f"{file}: not measured, so the shipped figures: memory_gib, peak_flops, network_bytes" in table
    with pytest.raises(SystemExit) as stopped:  # a second time
        command.main([f"--rates={file}"])
    assert stopped.value.code == 2 and f"--rates={file} exists" in capsys.readouterr().err


@pytest.mark.long
def test_programs_and_links_are_timed_on_the_first_device_and_in_every_group():
    answer = rates.measure(["a"], TINY)
    kinds = {timing.kind for timing in answer.timings}
    assert kinds >= {MATMUL[False], MATMUL[True], COPY, *map(attention_kind, (64, 128, 192, 256))}
    assert {f"{name} within a host ({size})" for name in rates.LINKS for size in (2, 4, 8)} <= kinds
    assert all(timing.seconds > 0 for timing in answer.timings)


def test_a_rate_below_the_shipped_one_is_a_sentence(tmp_path):
    own = replace(H200, memory_bytes=0.8 * H200.memory_bytes, link_bytes=0.92 * H200.link_bytes, network_bytes=1.0)
    table, [slow] = rates.compared(own, ["memory_bytes", "link_bytes", "bf16_flops"], H200)
    assert slow.startswith("copy in memory: 3360 GB/s is 80% of the shipped rate (H200)")
    assert table.splitlines()[-1].split() == "gathers and reductions between hosts not measured 40 GB/s".split()
    assert not rates.compared(own, ["memory_bytes"], None)[1]
    copies = [rates.Answer([Timing(COPY, 1, own.memory_bytes, 1.0)], None)]
    last = [
        rates.finish(tmp_path / f"{kind}.json", rates.Machine(kind, 8, 1), copies).splitlines()[-2:]
        for kind in ("NVIDIA H200", "NVIDIA RTX A6000")
    ]
    assert last[0][0] == slow and last[1][1].startswith("There are no shipped rates of NVIDIA RTX A6000: ")
    shipped = rates_of_kind("NVIDIA H100 80GB HBM3")
    assert shipped is not None and shipped.name == "H100" and rates_of_kind("NVIDIA RTX A6000") is None


def test_several_hosts_give_their_median_and_the_rate_between_them():
    def answer(factor, links):
        copy = Timing(COPY, 1, 4e12, factor)
        return rates.Answer([copy, *links], 70.0 + factor)

    # A reduction takes 3 times a gather: the relative errors of g gathers, (g - 1)² + (g / 3 - 1)², are least at 1.2.
    between = [
        Timing(f"{name} between hosts (2)", n, n, factor * (1e-5 + n / 4e10))
        for name, factor in (("all-gather", 1), ("reduce-scatter", 3))
        for n in (1e8, 4e8)
    ]
    answers = [answer(1.1, between), answer(2.0, []), answer(1.0, [])]
    found, measured = rates.machine_rates(rates.Machine("NVIDIA H100 80GB HBM3", 24, 3), answers)
    assert (found.memory_bytes, found.network_bytes) == (pytest.approx(4e12 / 1.1), pytest.approx(4e10 / 1.2))
    assert (found.memory_gib, found.hosts_of, found.name) == (71.0, 8, "H100")
    assert sorted(measured) == ["hosts_of", "memory_bytes", "memory_gib", "network_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rates=nowhere/rates.json"], "--rates=nowhere/rates.json cannot be written"),
        (["x.yaml", "--rates=r.json"], "leave x.yaml out"),
    ],
)
def test_bad_arguments_are_sentences_before_anything_is_measured(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(
        "model: {num_layers: 1, hidden_size: 8, num_heads: 2, vocab_size: 9}\nbatch: {global_size: 8, "
        "sequence_length: 4}\ndata: {kind: synthetic}\n"
    )
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_program_that_cannot_run_is_left_out_with_a_warning():
    [program] = [program for program in programs(TINY, Hardware("cpu")) if program.kind == COPY]

    def fails(arrays):
        raise RuntimeError("cuDNN is not detected.")

    with pytest.warns(UserWarning, match=r"copy, size 64, was not measured: cuDNN is not detected\."):
        assert rates.timed(program._replace(function=fails), TINY) is None
    timing = rates.timed(program, TINY)
    assert timing is not None and timing[:3] == (COPY, 64, 128)
    start = time.perf_counter()
    assert rates.timed(program, replace(TINY, warm_seconds=0.2)) and time.perf_counter() - start >= 0.2
