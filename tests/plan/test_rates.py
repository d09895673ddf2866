"""A file of rates replaces the device's; a bad one is a sentence with the file and the key."""

import json
import os
import re
import subprocess
import sys

import pytest

from megajax import commands
from megajax.errors import InputError
from megajax.estimate.costs import peak_flops
from megajax.tools.plan import DEVICE_NAMES
from megajax.tools.plan import __main__ as command
from megajax.tools.plan.rates import DEVICES, H200, SCALED, rates_of, read_rates, write_rates


def test_a_file_replaces_the_rates_that_it_names(tmp_path):
    file = tmp_path / "rates.json"
    own = {"bf16_flops": 7e14, "bf16_half_rate": 100, "hosts_of": 4, "attention_flops": {"64": 3e14, "128": 4e14}}
    file.write_text(json.dumps(own | {"attention_half_rate": 500}))
    rates = read_rates(file, H200)
    assert rates.matmul_flops(100, fp8=False) == 3.5e14  # half of the rate
    assert rates.attention(128, 500) == 2e14
    assert (rates.hosts_of, rates.fp8_flops, rates.memory_bytes) == (4, H200.fp8_flops, H200.memory_bytes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"bf16": 1.0}, "bf16 is no rate"),
        ({"memory_bytes": -1}, "memory_bytes=-1 is no positive number"),
        ({"nccl_bytes": "fast"}, "nccl_bytes=fast"),
        ({"hosts_of": 1.5}, "hosts_of=1.5"),
        ({"attention_flops": {"128": 0}}, "attention_flops.128=0"),
        ({"attention_flops": 4e14}, "attention_flops"),
        ({"name": 200}, "name=200 is no text: write a name in quotes"),
        ([1], "should be an object"),
    ],
)
def test_a_bad_file_is_a_sentence(tmp_path, content, words):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        read_rates(file, H200)
    assert str(file) in str(error.value) and words in str(error.value)


def test_rates_say_whether_they_were_measured(tmp_path):
    """By data sheets: TFLOP/s in BF16 and in FP8, TB/s of memory, GB/s of NVLink; an H200 has 989, 1979, 4.8 and 900.

    An L40S has PCIe alone: 25 GB/s where 350 of an H200's 900 were measured.

    An A100 multiplies in BF16 what other GPUs multiply in FP8.
    """
    file = tmp_path / "rates.json"
    write_rates(file, H200, {"device": "H200"})
    assert "measured" in json.loads(file.read_text()) and read_rates(file, H200).origin == f"those of {file}"
    sheets = {"h100": (989, 1979, 3.35, 900), "a100": (312, None, 2.039, 600), "b200": (2250, 4500, 8.0, 1800)}
    sheets["l40s"] = (362, 724, 0.864, 900 * 25 / 350)
    in_fp32 = {"h200": 67, "h100": 67, "a100": 19.5, "b200": 75, "l40s": 91.6}  # TFLOP/s, not of tensor cores
    assert {n: 989 / 720 * rates.fp32_flops / 1e12 for n, rates in SCALED.items()} == pytest.approx(in_fp32)
    assert {*sheets} == {*SCALED} - {"h200"} and rates_of("A100").origin == "an H200's, scaled by data sheets"
    for name, (bf16, fp8, memory, links) in sheets.items():
        rates = SCALED[name]
        assert rates.bf16_flops / H200.bf16_flops == pytest.approx(bf16 / 989), name
        assert rates.fp8_flops == pytest.approx(H200.fp8_flops * fp8 / 1979 if fp8 else rates.bf16_flops, rel=1e-3)
        attention = [rates.attention(width, 4096) / H200.attention(width, 4096) for width in (64, 128, 192, 256)]
        assert attention == pytest.approx([bf16 / 989] * 4), name
        assert rates.memory_bytes / H200.memory_bytes == pytest.approx(memory / 4.8), name
        for link in ("link_bytes", "nccl_bytes"):
            assert getattr(rates, link) / getattr(H200, link) == pytest.approx(links / 900), name
        assert rates.with_links(None, 200).network_bytes == 0.8 * 25e9  # of 200 Gbit/s of a card


@pytest.mark.parametrize(
    ("device", "gbs"),
    [
        # A card has 40 GB/s of its 400 Gbit/s; the links of a GPU have 350 GB/s, less of an older NVLink, or PCIe's 25
        ("h200", [320, 160, 80, 40, 40]),
        ("h100", [320, 160, 80, 40, 40]),
        ("b200", [320, 160, 80, 40, 40]),
        ("a100", [350 * 600 / 900, 160, 80, 40, 40]),
        ("l40s", [25] * 5),
    ],
)
def test_a_group_on_several_hosts_uses_the_cards_of_its_gpus_as_far_as_their_links_carry_it(device, gbs):
    """Of GPUs that are 1, 2, 4, 8 and 16 apart in hosts of 8; within a host the link alone counts."""
    rates, strides = SCALED[device], (1, 2, 4, 8, 16)
    assert [rates.group_bytes(True, stride) / 1e9 for stride in strides] == pytest.approx(gbs)
    assert [rates.group_bytes(False, stride) for stride in strides] == [rates.link_bytes] * 5


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_is_that_of_the_data_sheet_for_mfu_and_for_the_planner(device):
    """Dense BF16, which NVIDIA's data sheets give beside twice as much with sparsity."""
    sheets = {"h100": 989e12, "h200": 989e12, "a100": 312e12, "l40s": 362e12, "b200": 2250e12}
    rates = rates_of(device)
    assert peak_flops(f"NVIDIA {rates.name} 80GB HBM3") == sheets[device] == pytest.approx(rates.peak_flops)


def test_the_plan_uses_the_file_and_then_the_links(tmp_path, capsys, eight_layers):
    file = tmp_path / "rates.json"
    file.write_text('{"bf16_flops": 7e14, "hosts_of": 4}')
    pinned = ["mesh.pipeline=1", "mesh.context=1", "mesh.tensor=2"]
    assert command.main([str(eight_layers(8)), "--gpus=8", f"--rates={file}", "--hosts-of=2", *pinned]) == 0
    assert f"8 H200s, hosts of 2; rates: those of {file}" in capsys.readouterr().out


def test_the_names_of_devices_are_those_with_rates():
    assert list(DEVICES) == list(DEVICE_NAMES)


@pytest.mark.parametrize("name", ["plan", "profile", "compile", "explain-weight"])
def test_the_help_of_a_command_names_all_devices(name, capsys):
    with pytest.raises(SystemExit):
        commands.main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split()).rpartition(" --device ")[2]
    assert set(DEVICES) <= set(re.findall(r"\w+", text.partition(" --")[0]))


def test_the_device_that_is_assumed_is_named_with_the_others(capsys, eight_layers):
    arguments = [str(eight_layers(8)), "--gpus=8", "--explain", "tensor=2"]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.startswith(
        "--device is not given: H200 is assumed. The others are h100, a100, l40s, b200"
    )
    assert command.main([*arguments, "--device", "h100"]) == 0
    assert "--device" not in capsys.readouterr().out


FIRST_WORD = """
import io, os, sys
from megajax.tools.plan.__main__ import main

class Stream(io.StringIO):
    def isatty(self):
        return True
    def write(self, text):
        if "loading the planner" in text:
            print(sorted({"jax", "flax", "numpy", "pydantic", "megajax.config"} & set(sys.modules)), flush=True)
            os._exit(0)
        return len(text)

sys.stderr = Stream()
main(["llama3_8b", "--gpus", "8"])
"""


def test_the_first_word_on_a_terminal_comes_before_the_imports_that_take_seconds():
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", FIRST_WORD], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
