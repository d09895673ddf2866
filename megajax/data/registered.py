"""Documents that a function of an extension reads (`options/data_kinds.py`)."""

from typing import Any

import numpy as np

from megajax.config.extensions import import_extensions
from megajax.errors import InputError, reported
from megajax.options.data_kinds import KINDS


class RegisteredDataset:
    """The documents of one path, as `IndexedDataset` has those of a pair of files."""

    def __init__(self, kind: str, path: str, extensions: tuple[str, ...]):
        """Raises InputError, with the path, if the function fails or gives no tokens, or no documents."""
        self._arguments = kind, path, extensions
        import_extensions(extensions)  # a process that reads ahead gets the arguments only
        read = KINDS[kind].read
        assert read is not None
        with reported(f"data.kind={kind} could not read {path}", "mend the file, or the function that reads it"):
            tokens, ends = read(path)
        self.prefix = self.token_file = path
        self.tokens: Any = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
        ends = np.asarray(ends, np.int64)
        problem = ""
        if not self.tokens.size:
            problem = "no tokens"
        elif self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            problem = f"tokens of shape {self.tokens.shape} and dtype {self.tokens.dtype}, not [T] integers"
        elif (
            ends.ndim != 1
            or np.any(np.diff(ends) < 0)
            or (ends.size and not 0 <= ends[0] <= ends[-1] <= self.tokens.size)
        ):
            problem = f"ends of documents that are not ascending, from 0 to its {self.tokens.size} tokens"
        if problem:
            raise InputError(f"data.kind={kind} gave {problem}, for {path}: mend the function that reads it.")
        rest = [] if ends.size and ends[-1] == self.tokens.size else [self.tokens.size]
        self._starts = np.concatenate([[0], ends, rest]).astype(np.int64)
        self.dtype, self.num_documents = self.tokens.dtype, len(self._starts) - 1

    def __reduce__(self) -> Any:
        return RegisteredDataset, self._arguments

    def __len__(self) -> int:
        return self.num_documents

    def document_starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """As in `IndexedDataset`."""
        return self._starts[first : (self.num_documents if last is None else last) + 1]
