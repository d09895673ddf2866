"""What pickles of torch and Megatron name.

`torch_dtypes.pt` is torch.save's, of the numbers 1, 0, 3 in each dtype by its name.
"""

import io
import pickletools
import zipfile
from pathlib import Path, PurePosixPath

import ml_dtypes
import numpy as np
import pytest

from megajax.errors import InputError
from megajax.megatron.pickled import TorchZip, load_plain
from megajax.megatron.torch_files import Call, Named, pickled, save, tensor

FILE = Path(__file__).parents[1] / "data_files/torch_dtypes.pt"


def records(file: io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_each_dtype_of_torch_is_read_and_written():
    theirs = io.BytesIO(FILE.read_bytes())
    found = TorchZip(theirs, 0, len(theirs.getvalue()), "file")
    assert len(found.value) == 10
    arrays = {}
    for i, (name, info) in enumerate(found.value.items()):
        assert info.dtype == np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        arrays[str(i)] = np.frombuffer(theirs.getvalue(), info.dtype, 3, found.place(info).at)
        np.testing.assert_array_equal(arrays[str(i)].astype(int), [1, 0, 1 if name == "bool" else 3])
    ours = io.BytesIO()
    save(ours, {name: tensor(i, arrays[i]) for name, i in zip(found.value, arrays, strict=True)}, arrays)
    mine, own = records(ours), records(theirs)
    assert mine.keys() == {name for name in own if not name.startswith(".")}
    assert {name: own[name] for name in mine if name != "data.pkl"} | {"data.pkl": mine["data.pkl"]} == mine
    codes = [[(code.name, text) for code, text, _ in pickletools.genops(each["data.pkl"])] for each in (mine, own)]
    for kind in ("GLOBAL", "NEWFALSE"):  # NEWFALSE: no tensor needs a gradient
        ours, theirs = ([text for code, text in each if code == kind] for each in codes)
        assert set(ours) == set(theirs) and (kind == "GLOBAL" or len(ours) == len(theirs))


STRIDED, PATH = "torch.strided", PurePosixPath("a/b")
# What arguments, their files and lists of tensors name beside tensors, with what it becomes
NAMED = {
    "collections OrderedDict": ((), {}),
    "torch Size": (((1, 2),), (1, 2)),
    "torch._utils _rebuild_parameter": ((7, True, None), 7),
    "torch.serialization _get_layout": ((STRIDED,), STRIDED),
    **{
        f"{module} {kind}": (("a", "b"), PATH)
        for module in ("pathlib", "pathlib._local")  # the second since Python 3.13
        for kind in ("PosixPath", "PurePosixPath")
    },
    **dict.fromkeys(("argparse Namespace", "types SimpleNamespace", "_io BytesIO"), ((3,), None)),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_a_checkpoint_may_name_is_held(name):
    arguments, expected = NAMED[name]
    found = load_plain(pickled(Call(Named(*name.split()), arguments)), "file")
    assert (type(found).__name__, found.made_of) == (name.split()[1], (3,)) if expected is None else found == expected
    with pytest.raises(InputError, match="os.system"):
        load_plain(pickled(Call(Named("os", "system"), ())), "file")
