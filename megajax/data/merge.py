"""`python -m megajax.data.merge`: the documents of several `.bin/.idx` pairs in one, in the order given."""

import os
import sys
from collections.abc import Sequence

from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.progress import data_size
from megajax.errors import InputError


def merge(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int]:
    """Writes the documents of all pairs under `output_prefix`; returns the numbers of documents and tokens.

    Raises InputError if a pair is damaged, if the dtypes differ, if only some have modes, if the output is one of the
    pairs, or if it cannot be written; older files under its prefix are then unchanged.
    """
    if output_prefix.endswith("/"):
        raise InputError(f"--output-prefix {output_prefix} is a directory; add a name, such as {output_prefix}merged.")
    first, *others = opened = [IndexedDataset(prefix) for prefix in prefixes]
    for prefix in prefixes:
        if os.path.realpath(prefix) == os.path.realpath(output_prefix):
            raise InputError(f"--output-prefix {output_prefix} is also an --input: choose another output prefix.")
    for other in others:
        if other.dtype != first.dtype:
            raise InputError(
                f"--input: {other.prefix}.bin has {other.dtype.name} tokens, {first.prefix}.bin {first.dtype.name}: "
                "write one of them again, with the other's tokenizer."
            )
        if (other.modes is None) != (first.modes is None):
            raise InputError(
                f"--input: only one of {first.prefix}.idx and {other.prefix}.idx has modes (of multimodal data): merge "
                "files of one kind."
            )
    with IndexedWriter(output_prefix, first.dtype, multimodal=first.modes is not None) as writer:
        for dataset in opened:
            writer.add_dataset(dataset)
    return writer.num_documents, writer.num_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    description = "Write the documents of several .bin/.idx pairs into one pair, in the order given."
    parser = CommandParser("megajax.data.merge", description=description)
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="prefixes of the pairs")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="P.bin and P.idx are written")
    with user_errors():
        options = parser.parse_args(arguments)
        documents, tokens = merge(options.input, options.output_prefix)
        print(f"{options.output_prefix}.bin/.idx: {data_size(documents, tokens)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
