"""Hostile inputs: mutated files of each kind, read in a process with limits on time and memory.

`python scripts/fuzz.py` writes a valid file of each kind, changes copies of it (bits, bytes, length fields, text,
nesting, cut and joined), and reads each copy. A read must end in success or in one sentence (`UserError`). Another
exception, the end of the process, a read of more than SECONDS, and an allocation above `allowed_bytes` are failures;
they are printed with the number that repeats them. Exit status 1 if there is one.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megajax.errors import UserError

Case = tuple[int, str, dict[str, Any]]  # its number, the changed file, its outcome
SECONDS = 10.0  # of the processor
HEADROOM = 2**30  # of address space, besides that after the first read
NUMBERS = (0, 1, -1, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63)
NUMBERS = tuple(n + d for n in NUMBERS for d in (-1, 0, 1))
TEXTS = (
    *(b"", b"null", b"true", b"-1", b"0", b"0.5", b"1e308", b".inf", b"NaN", b"[]", b"{}", b'""', b"[[1]]", b"{a: 1}"),
    *(b'"../../../etc/passwd"', b'"/etc/passwd"', b'"\\0"', b'"\\ud800"', b"\t", b"---", b"*a", b"&a [*a]", b"<<"),
    *(b"!!python/object/apply:os.system [exit 1]", b"\xff\xfe", b"\x00", b'"' + b"x" * 5000 + b'"'),
    *(b"9" * 30, b"9" * 5000, b"-" + b"9" * 400, b"1e-400"),
)
CONFIG = """
run: {name: fuzz, steps: 8, log_interval: 1}
model: {num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 64, vocab_size: 125}
mesh: {data: 1}
batch: {global_size: 8, sequence_length: 16, num_microbatches: 2, schedule: "0:4, 4:8"}
schedule: {kind: cosine, learning_rate: 3.0e-3, warmup_steps: 2}
data:
  kind: indexed
  train: [{prefix: a, weight: 0.5}, {prefix: b, weight: 0.5}]
  split: "969,30,1"
checkpoint: {keep: 2, init_from: null}
logging: {tensorboard: false}
"""


def allowed_bytes(size: int) -> int:
    """The largest allocation for reading files of `size` bytes: parsed text takes up to 100 times its size."""
    return 2**24 + 100 * size


class Mutator:
    """Changes bytes by a random generator, up to four changes at a time."""

    def __init__(self, random: random.Random):
        self.random = random
        self.changes: list[Callable[[bytes], bytes]] = [
            *(self.flip, self.number, self.cut, self.remove, self.copy, self.word, self.word, self.nest, self.aliases)
        ]

    def __call__(self, data: bytes) -> bytes:
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            data = self.random.choice(self.changes)(data)
        return data

    def at(self, data: bytes) -> int:
        """A position; the beginning, where headers are, is as likely as the rest."""
        return self.random.randrange(min(len(data), self.random.choice((64, 1 << 30))) + 1)

    def flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.randint(1, 8) if data else 0):
            changed[min(self.at(data), len(data) - 1)] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def number(self, data: bytes) -> bytes:
        width, at = self.random.choice((1, 2, 4, 8)), self.at(data)
        value = self.random.choice((*NUMBERS, len(data), len(data) - 1, len(data) + 1)) % (1 << 8 * width)
        return data[:at] + value.to_bytes(width, "little") + data[at + width :]

    def cut(self, data: bytes) -> bytes:
        return data[: self.at(data)]

    def remove(self, data: bytes) -> bytes:
        at = self.at(data)
        return data[:at] + data[at + self.random.randint(1, 16) :]

    def copy(self, data: bytes) -> bytes:
        start, at = self.at(data), self.at(data)
        return data[:at] + data[start : start + self.random.randint(1, 256)] + data[at:]

    def word(self, data: bytes) -> bytes:
        """Another value instead of a number or a name of a text."""
        words = [*re.finditer(rb'"[^"]*"|[\w./-]+', data[: 1 << 16])]
        if not words:
            return data
        found = self.random.choice(words)
        values = (*TEXTS, *(str(n).encode() for n in NUMBERS), self.random.choice(words).group())
        return data[: found.start()] + self.random.choice(values) + data[found.end() :]

    def nest(self, data: bytes) -> bytes:
        depth, (first, last) = self.random.choice((10, 200, 5000)), self.random.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return self._instead_of_a_word(data, first * depth + b"1" + last * depth)

    def aliases(self, data: bytes) -> bytes:
        """YAML whose size is exponential in its number of aliases."""
        lists = [b"&a0 [x]", *(b"&a%d [%s]" % (i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12))]
        return self._instead_of_a_word(data, b"[" + b", ".join(lists) + b"]")

    def _instead_of_a_word(self, data: bytes, value: bytes) -> bytes:
        words = [*re.finditer(rb"[\w.]+", data[: 1 << 16])]
        if not words:
            return value
        found = self.random.choice(words)
        return data[: found.start()] + value + data[found.end() :]


class Idx:
    """`.idx` beside its `.bin`."""

    def __init__(self, folder: Path):
        from megajax.data.indexed import IndexedWriter

        self.prefix, generator = folder / "tokens", random.Random(1)
        with IndexedWriter(self.prefix, "<u2", multimodal=True) as writer:
            for _ in range(20):
                lengths = [generator.randrange(9) for _ in range(2)]
                writer.add_document([7] * sum(lengths), lengths, modes=[0, 1])
        self.files = [folder / "tokens.idx"]

    def read(self) -> None:
        from megajax.data.indexed import IndexedDataset

        dataset = IndexedDataset(self.prefix)
        for i in range(len(dataset)):
            dataset[i].sum()
        for i in range(dataset.num_documents):
            dataset.document(i).sum()


class Safetensors:
    """The header of a model's weights in a file that an index names."""

    def __init__(self, folder: Path):
        import jax
        from safetensors.numpy import load_file

        from megajax.config import ModelConfig
        from megajax.hf.convert import export
        from megajax.hf.folder import INDEX, SINGLE
        from megajax.model import Transformer, parameters

        sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 16, "vocab_size": 16}
        self.model = ModelConfig.model_validate(sizes | {"vocab_multiple": 16})
        self.folder = folder / "model"
        shapes = {name: p.shape for name, p in parameters(Transformer(self.model)).items()}
        weights = {name: jax.numpy.zeros(shape) for name, shape in shapes.items()}
        export(weights, self.model, self.folder, "float32", {})
        single, shard = self.folder / SINGLE, self.folder / "model-00001-of-00001.safetensors"
        index = {"weight_map": dict.fromkeys(load_file(single), shard.name)}  # as a large model has it
        (self.folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        self.files = [single.rename(shard)]

    def read(self) -> None:
        from megajax.hf.folder import Weights, read_config

        with Weights(self.folder, read_config(self.folder).get("quantization_config")) as weights:
            for name in weights.files:
                shape = weights.shape(name)
                weights.itemsize(name)
                weights.read(name, tuple(slice(0, size) for size in shape)).sum()


class ModelFolder(Safetensors):
    """config.json and model.safetensors.index.json of a model's folder, read as `checkpoint.init_from`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.files = [self.folder / "config.json", self.folder / "model.safetensors.index.json"]

    def read(self) -> None:
        from megajax.config import ModelConfig
        from megajax.hf.convert import open_readers, read_folder
        from megajax.model import Transformer, parameters

        model = ModelConfig.model_validate(read_folder(self.folder)[1])
        shapes = {name: p.shape for name, p in parameters(Transformer(model)).items()}
        with open_readers(self.folder, model, shapes, "HF_FOLDER") as readers:
            for reader in readers.values():
                for _, _, block in reader.blocks():
                    block.sum()


class ConfigFile:
    """A run's YAML file."""

    def __init__(self, folder: Path):
        self.files = [folder / "config.yaml"]
        self.files[0].write_text(CONFIG, encoding="utf-8")

    def read(self) -> None:
        from megajax.config import load_config

        load_config(self.files[0]).to_yaml()


class Checkpoint:
    """The description and the metadata of a checkpoint, compared and restored as a run does that resumes."""

    def __init__(self, folder: Path):
        import jax

        from megajax.checkpoint import Checkpoints
        from megajax.config import load_config
        from megajax.mesh import build_mesh
        from megajax.training.saving import StateSaver
        from megajax.training.step import TrainProgram

        path = folder / "tiny.yaml"
        path.write_text(re.sub(r"data:\n(  .*\n)*", "data: {kind: synthetic}\n", CONFIG), encoding="utf-8")
        config = load_config(path, [f"run.dir={folder / 'run'}"])
        self.saver = StateSaver(TrainProgram.build(config, build_mesh({}, jax.devices()[:1])))
        self.checkpoints = Checkpoints(folder / "run", keep=2, keep_every=None)
        self.saver.save(self.checkpoints, 4, self.saver.program.init_state())
        self.checkpoints.wait()
        step = folder / "run" / "checkpoints" / "4"
        self.files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size < 2**16]
        self.files = [step / "description" / "metadata"] * len(self.files) + self.files

    def read(self) -> None:
        from megajax.training.resuming import Start

        start = Start(self.saver, lambda: self.checkpoints)
        self.saver.warn_of_another_rate(start.saved, start.name)
        start.state()


class TokenizerFiles:
    """tokenizer.json, GPT-2's files, a tiktoken file, tokenizer_config.json and a chat template."""

    def __init__(self, folder: Path):
        import base64

        import tokenizers

        model = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<eos>": 3}, merges=[("a", "b")])
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        tokenizer.add_special_tokens(["<eos>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "gpt2").mkdir()
        model.save(str(folder / "gpt2"))
        (folder / "gpt2" / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}', encoding="utf-8")
        tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"abab"]
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
        (folder / "tiktoken").mkdir()
        (folder / "tiktoken/llama3.tiktoken").write_bytes(b"".join(lines))
        (folder / "tokenizer_config.json").write_text(
            '{"eos_token": {"content": "<eos>"}, "pad_token": "<eos>",'
            ' "added_tokens_decoder": {"3": {"content": "<eos>"}}}',
            encoding="utf-8",
        )
        (folder / "chat_template.jinja").write_text(
            "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}"
            "{% if 1 + 2 * 3 > 2 %}!{% endif %}{% endfor %}",
            encoding="utf-8",
        )
        (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [1, 2]}', encoding="utf-8")
        names = ("tokenizer.json", "gpt2/vocab.json", "gpt2/merges.txt", "tiktoken/llama3.tiktoken")
        self.folder, self.files = folder, [folder / name for name in names]
        beside = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
        self.files += [folder / name for name in beside]

    def read(self) -> None:
        from megajax.data.chat_template import load_chat_template
        from megajax.data.rendering import Chat
        from megajax.data.sandbox import Stopped
        from megajax.data.tokenizers import load_tokenizer
        from megajax.hf.beside import token_names

        for name in ("tokenizer.json", "gpt2", "tiktoken"):
            tokenizer = load_tokenizer(str(self.folder / name))
            tokenizer.decode(tokenizer.encode("ab ba <eos>"))
        token_names(self.folder)
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            load_chat_template(self.folder).samples([Chat(messages, {})])
        except Stopped as stopped:
            raise stopped.error from None


KINDS: dict[str, Any] = {
    "idx": Idx,
    "safetensors": Safetensors,
    "model_folder": ModelFolder,
    "config": ConfigFile,
    "checkpoint": Checkpoint,
    "tokenizer": TokenizerFiles,
}


def outcome_of(read: Callable[[], None], size: int) -> dict[str, Any]:
    """{"ends": ok, sentence or FAILED, "why", "seconds", "bytes"} of one read of files of `size` bytes."""
    tracemalloc.reset_peak()
    start, before = time.process_time(), tracemalloc.get_traced_memory()[0]
    ends, why = "ok", ""
    try:
        read()
    except UserError as error:
        ends, why = "sentence", str(error)
        if len(why) > 10_000 or not all(line.startswith("  ") for line in why.splitlines()[1:]):  # a list of keys
            ends = "FAILED"
    except BaseException as error:  # also those of Rust's panics
        if isinstance(error, KeyboardInterrupt):
            raise
        ends, why = "FAILED", f"{type(error).__name__}: {error}"[:300]
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1] - before
    if peak > allowed_bytes(size):
        ends, why = "FAILED", f"{peak} bytes were allocated; {why}"[:300]
    if seconds > SECONDS:
        ends, why = "FAILED", f"{seconds:.0f} s; {why}"[:300]
    return {"ends": ends, "why": why[:2000], "seconds": seconds, "bytes": peak}


def failure(why: str, seconds: float) -> dict[str, Any]:
    return {"ends": "FAILED", "why": why, "seconds": seconds, "bytes": 0}


def cases(kind: str, seed: int, first: int, count: int, ready: Callable[[], None]) -> Iterator[Case]:
    """Read the cases first..count-1 of a kind; calls `ready` when valid files have been read once."""
    with tempfile.TemporaryDirectory() as folder:
        subject = KINDS[kind](Path(folder))
        valid = {path: path.read_bytes() for path in subject.files}
        subject.read()
        ready()
        tracemalloc.start()
        try:
            for case in range(first, count):
                generator = random.Random(f"{kind} {seed} {case}")
                path = generator.choice(subject.files)
                path.write_bytes(Mutator(generator)(valid[path]))
                found = outcome_of(subject.read, path.stat().st_size)
                path.write_bytes(valid[path])
                yield case, path.name, found
        finally:
            tracemalloc.stop()


def work(kind: str, seed: int, first: int, count: int, results: Any) -> None:
    """Send the outcomes of cases, from a process with a limit on its memory."""
    for stream in (1, 2):  # of libraries
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ |= {"JAX_PLATFORMS": "cpu", "RUST_BACKTRACE": "0"}
    warnings.simplefilter("ignore")

    def limit() -> None:
        in_use = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, resource.RLIM_INFINITY))

    for case in cases(kind, seed, first, count, limit):
        results.send(case)


def run(kind: str, seed: int, count: int, first: int = 0) -> list[Case]:
    """The outcomes (case, file, outcome) of the cases; the end of the process, or its silence, is an outcome too."""
    context, outcomes = multiprocessing.get_context("spawn"), []
    while first < count:
        results, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(kind, seed, first, count, sender), daemon=True)
        process.start()
        sender.close()
        silence = 120.0  # the start
        try:
            while first < count:
                if not results.poll(silence):
                    outcomes.append((first, "", failure("hang", silence)))
                    first += 1
                    break
                outcomes.append(results.recv())
                first, silence = first + 1, 3 * SECONDS
        except EOFError:
            process.join()
            outcomes.append((first, "", failure(f"the process ended with {process.exitcode}", 0.0)))
            first += 1
        finally:
            process.kill()
            process.join()
    return outcomes


def table_row(kind: str, outcomes: list[Case]) -> str:
    ends = [found["ends"] for _, _, found in outcomes]
    seconds, size = (max(found[key] for _, _, found in outcomes) for key in ("seconds", "bytes"))
    counts = " | ".join(str(ends.count(end)) for end in ("ok", "sentence", "FAILED"))
    return f"| {kind} | {len(ends)} | {counts} | {seconds:.2f} | {size / 1e6:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--count", type=int, default=2500, help="cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="first case, to repeat one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print each case as JSON")
    options = parser.parse_args()
    rows, failures = [], 0
    for kind in options.kinds:
        outcomes = run(kind, options.seed, options.count, options.first)
        for case, file, found in outcomes:
            if options.verbose or found["ends"] == "FAILED":
                print(kind, case, file, json.dumps(found), flush=True)
        failures += sum(found["ends"] == "FAILED" for _, _, found in outcomes)
        rows.append(table_row(kind, outcomes))
    print("| files | cases | read | sentence | failed | longest, s | largest allocation, MB |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
