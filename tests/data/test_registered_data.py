"""Documents that an extension's function reads are the same samples as those of token files."""

import pickle
import re

import numpy as np
import pytest

from megajax.config import load_config, register_data
from megajax.config.extensions import import_extensions
from megajax.data.loader import make_loader, open_datasets
from megajax.data.registered import RegisteredDataset
from megajax.errors import ConfigError, InputError
from megajax.options.data_kinds import KINDS
from megajax.schema.data import DataSource

END = 256
DOCUMENTS = [[*range(i, i + n), END] for i, n in enumerate((5, 0, 40, 3, 17, 60, 9, 1))] + [[7, 8, 9]]
EXTENSION = """
import numpy as np
from megajax.config import register_data

def flat(path):
    tokens = np.memmap(path, np.uint16, "r")
    return tokens, np.flatnonzero(tokens == 256) + 1

register_data("flat", flat)
"""


@pytest.fixture
def flat(tmp_path, write_documents):
    """(the extension, the prefix of a pair of files, the flat file), of the same documents."""
    extension = tmp_path / f"{tmp_path.name}.py"  # a module of its own
    extension.write_text(EXTENSION)
    path = tmp_path / "flat.bin"
    np.concatenate(DOCUMENTS).astype(np.uint16).tofile(path)
    import_extensions((str(extension),))
    yield str(extension), write_documents(DOCUMENTS), str(path)
    del KINDS["flat"]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_token_files(make_config, flat, tmp_path, workers):
    """Two sources of one file, a split, separate documents; also after a resume, in a process that reads ahead.

    It has the names of the samples' extension alone, and imports those of the run.
    """
    extension, *sources = flat
    notes = tmp_path / f"{tmp_path.name}_notes.py"
    notes.write_text('import os, pathlib\npathlib.Path(__file__).with_name(f"pid-{os.getpid()}").touch()\n')
    batches, held_out = [], []
    for kind, source in zip(("indexed", "flat"), sources, strict=True):
        how = {"reset_attention": True, "mask_end_of_document_loss": True}
        how |= {"workers": workers if kind == "flat" else 0, "prefetch": 2}
        blend = ({"prefix": source, "weight": weight} for weight in (0.7, 0.3))
        config = make_config(kind=kind, train=tuple(DataSource(**each) for each in blend), split="70,30,0", **how)
        config.run.extensions = (extension,)
        opened = open_datasets(config)
        config.run.extensions = (str(notes),)
        loader = make_loader(config, split="train", rows=np.arange(4), start_step=3, samples=opened["train"])
        batches.append([next(loader) for _ in range(7)])
        loader.close()
        held_out.append([opened["valid"][i].tolist() for i in range(3)])
    assert held_out[0] == held_out[1] and len([*tmp_path.glob("pid-*")]) == workers
    for ours, theirs in zip(*batches, strict=True):
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            np.testing.assert_array_equal(ours[name], expected, err_msg=name)


def test_tokens_after_the_last_end_are_a_document(flat):
    extension, _, path = flat
    dataset = pickle.loads(pickle.dumps(RegisteredDataset("flat", path, (extension,))))
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    assert dataset.document_starts().tolist() == [0, *ends] and dataset.document_starts(2, 4).tolist() == [*ends[1:4]]
    assert (len(dataset), dataset.num_documents) == (9, 9)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (([[1, 2]], [2]), "tokens of shape (1, 2) and dtype int64, not [T] integers"),
        (([1.0, 2.0], [2]), "tokens of shape (2,) and dtype float64"),
        (([], []), "no tokens"),
        (([1, 2, 3], [2, 1]), "not ascending, from 0 to its 3 tokens"),
        (([1, 2, 3], [4]), "not ascending, from 0 to its 3 tokens"),
        (ValueError("a bad header"), "could not read my.bin (ValueError: a bad header): mend the file"),
    ],
)
def test_what_a_function_may_not_give_is_a_sentence(found, problem):
    def read(path):
        if isinstance(found, Exception):
            raise found
        return found

    register_data("odd", read)
    try:
        with pytest.raises(InputError, match=f"data.kind=odd .*{re.escape(problem)}"):
            RegisteredDataset("odd", "my.bin", ())
    finally:
        del KINDS["odd"]


def test_keys_of_other_kinds(flat):
    """In a config: what the kind needs, what it does not have, and a name that nobody registered."""
    extension, _, path = flat
    given = [f"run.extensions=[{extension}]", "data.kind=flat"]
    assert load_config("llama_100m", [*given, f"data.train={path}", "data.split='8,1,1'"]).data.train == path
    for override, problem in {
        "data.train=null": "data.kind=flat needs data.train",
        "data.order=megatron": "data.order=megatron cannot be combined with data.kind=flat",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            load_config("llama_100m", [*given, f"data.train={path}", override])
    with pytest.raises(ConfigError, match=r"data.kind=flats is not a choice .*did you mean flat\?"):
        load_config("llama_100m", [*given, "data.kind=flats"])
