"""The picture of a traced pipeline: a small made-up trace gives the boxes worked out by hand."""

import gzip
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pipeline_picture
import pytest
from made_up_trace import Event, space
from pipeline_picture import Box

# (start, duration, name) in µs; the trace starts at 1000. The name nvjet_… does not identify a matmul.
MATMUL, WEIGHT = "nvjet_sm90_tst_128x160_v_bz_NNT", "nvjet_sm90_tss_256x128_h_badd_coopA_NTT"
KERNELS = [
    (0, 200, "loop_broadcast_fusion"),  # far from all others
    (1000, 100, MATMUL),
    (1100, 100, "cudnn_flash_fprop_wgmma"),
    (1210, 3000, MATMUL),
    (4210, 10, MATMUL),  # nearer to the loss, but before NCCL
    (4220, 100, "ncclDevKernel_SendRecv"),
    (4250, 20, MATMUL),
    (4270, 100, "cross_entropy"),
    (4400, 30, MATMUL),
    (4430, 70, WEIGHT),  # the head's
    (4500, 20, "ncclDevKernel_AllGather"),
    (4530, 20, "gated_backward"),
    (4550, 50, "loop_add_fusion"),
    (4600, 400, WEIGHT),
    (5000, 100, MATMUL),  # no gradient of weights
    (5100, 100, "cudnn_flash_bprop_wgmma"),
    (5260, 40, "cudnn_flash_bprop_wgmma"),  # after a gap of 60 µs
    (5300, 100, "nvjet_sm90_tss_320x128_bx_coopB_NTT"),
]
BOXES = [
    Box("nccl", 4.22, 4.32),
    Box("nccl", 4.5, 4.52),
    Box("other", 0.0, 0.2),
    Box("forward", 1.0, 4.22),
    Box("head", 4.25, 4.5),
    Box("backward", 4.53, 4.6),
    Box("weight", 4.6, 5.0),
    Box("backward", 5.0, 5.2),
    Box("backward", 5.26, 5.3),
    Box("weight", 5.3, 5.4),
]


@pytest.fixture
def trace_dir(tmp_path: Path) -> Path:
    planes: dict[str, dict[str, list[Event]]] = {"/host:CPU": {}}
    for gpu in (1, 0):  # the trace is in no order
        streams: dict[str, list[Event]] = {"Stream #7(Compute)": [], "Stream #8(Compute)": [], "XLA Ops": []}
        for start, duration, name in reversed(KERNELS):
            event = Event(name, 1 + start / 1e3, 1 + (start + duration) / 1e3, {"hlo_op": "fusion.1"})
            streams[f"Stream #{8 if name.startswith('nccl') else 7}(Compute)"].append(event)
            streams["XLA Ops"].append(event)  # repeats what the streams have
        planes[f"/device:GPU:{gpu}"] = streams
    file = tmp_path / "trace/plugins/profile/run/host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(space(planes))
    return tmp_path / "trace"


def test_kernels_become_boxes_of_what_they_belong_to(trace_dir: Path):
    rows = pipeline_picture.read(trace_dir)
    assert list(rows) == ["GPU 0", "GPU 1"]
    found, length = pipeline_picture.step_of(rows)
    assert length == pytest.approx(5.4)
    for own in found.values():
        assert [box.kind for box in own] == [box.kind for box in BOXES]
        for box, expected in zip(own, BOXES, strict=True):
            assert box[1:] == pytest.approx(expected[1:])


def test_picture_has_a_row_for_each_gpu_in_the_colours_of_the_schedule(trace_dir: Path, tmp_path: Path):
    rows, output = tmp_path / "rows.json.gz", tmp_path / "picture.svg"
    sizes = ["--stages=2", "--microbatches=2", "--schedule=zero_bubble"]
    assert pipeline_picture.main([str(trace_dir), f"--output={output}", f"--save-rows={rows}", *sizes]) == 0
    text = output.read_text()
    root = ElementTree.fromstring(text)
    groups = [group for group in root if group.tag.endswith("}g")]
    kinds = [group.get("class", "").removeprefix("traced-") for group in groups]
    assert [len(group) for group in groups] == [sum(box.kind == kind for box in BOXES) for kind in kinds]
    for operation in ("forward", "backward", "weight"):
        drawn = [box for box in root if box.get("class") == operation]
        traced = [group for group in groups if group.get("class") == f"traced-{operation}"]
        assert len(drawn) == 4 and len({box.get("fill") for box in drawn + traced}) == 1
        heights = {rectangle.get("y") for group in traced for rectangle in group}
        assert len(traced) == len(heights) == 2
    assert pipeline_picture.main([str(rows), f"--output={output}", *sizes]) == 0
    assert output.read_text() == text


@pytest.mark.parametrize(
    "content, arguments, sentence",
    [
        (None, [], "No such file"),
        (b"no gzip", [], "gzip"),
        (gzip.compress(b"no json", mtime=0), [], "is no file of --save-rows"),
        (gzip.compress(b'{"GPU 0": [[1, 2]]}', mtime=0), [], "is no file of --save-rows"),
        (gzip.compress(b"{}", mtime=0), [], "has no kernels of GPUs"),
        (gzip.compress(b'{"GPU 0": [[1, 2, "k", ""]]}', mtime=0), [], "--stages=4 does not divide"),
        (
            None,
            ["--virtual-stages=2", "--microbatches=3"],
            "with virtual_stages=2, microbatches=3 must be a multiple of stages=4",
        ),
        (None, ["--schedule=none"], "schedule=none"),
    ],
)
def test_bad_input_gives_a_sentence(tmp_path: Path, capsys, content: bytes | None, arguments: list[str], sentence: str):
    file = tmp_path / "rows.json.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        pipeline_picture.main([str(file), f"--output={tmp_path / 'picture.svg'}", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "picture.svg").exists()


def test_a_directory_without_a_trace_is_named(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        pipeline_picture.main([str(tmp_path), "--output=picture.svg"])
    assert f"{tmp_path} has no trace (no *.xplane.pb)" in capsys.readouterr().err
