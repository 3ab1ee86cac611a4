"""``python -m shadowsup.workers.transformers.estimate MODEL …``: what an engine of this model will need, from headers alone.

Needs no torch and no network and loads no weights; runs in the interpreter and environment of the engines, which are what decides
where ``package:`` models and the hub's cache are. The result goes to stdout as one JSON object, what is wrong to stderr.

Exit codes: 0 done · 2 there is no such model, or the arguments are wrong · 3 a repository that is not in the local cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers import arguments, headers, model_ref

NOT_HERE = 3
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class _NotCached(WorkerError):
    """Raised for a repository that would have to be downloaded."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="estimate", description="Say what an engine will need.")
    parser.add_argument("model")
    parser.add_argument("--revision", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--args", default="{}", help="the worker's args, as JSON")
    parser.add_argument("--kv-size", type=int, default=0, help="bytes; 0: auto")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--reserve", type=int, default=None)
    parser.add_argument("--device", type=int, default=None, help="bytes of the GPU that it runs on")
    parser.add_argument("--shadows", type=int, default=1)
    given = parser.parse_args(argv)
    try:
        print(json.dumps(estimate(given)))
    except _NotCached as error:
        print(error, file=sys.stderr)
        return NOT_HERE
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def estimate(given: argparse.Namespace) -> dict[str, object]:
    """Return sizes in bytes. ``loading``: beyond ``weights``, until the first engine has published them.

    Raises:
        WorkerError: as the engine itself would say.
    """
    args = arguments.parse(json.loads(given.args), gpu=given.device is not None)
    files = model_ref.resolve(given.model, given.revision, _cached)
    if files.kind is model_ref.RefKind.DUMMY or args.load_format == "dummy":
        if args.config is None:
            hint = "give args: {load_format: dummy, config: {…}}, or name a model"
            raise WorkerError(f"model {given.model} has no files", hint, fatal=True)
        facts = headers.of_config(args.config)
    elif files.gguf is not None:
        facts = headers.of_gguf(Path(files.path))
    else:
        assert files.folder is not None
        facts = headers.of_safetensors(files.folder)
    dtype = facts.dtype if given.dtype == "auto" else given.dtype
    item = ITEM_BYTES.get(dtype, 4)
    block = facts.layers * 2 * given.block_tokens * facts.heads * facts.head_dim * item
    longest = min(facts.context, args.max_context or facts.context)
    kv = given.kv_size or arguments.choose_kv(
        args,
        longest=longest,
        block_tokens=given.block_tokens,
        block_bytes=block,
        device=given.device,
        weights=facts.parameters * item,
        shadows=given.shadows,
    )
    blocks = kv // block
    reserve = given.reserve if given.reserve is not None else min(2 * args.max_batch, blocks // 4)
    if blocks - reserve < 2:
        raise WorkerError(
            f"kv.size {kv} holds {blocks} blocks of {given.block_tokens} tokens ({block} B), {reserve} of them reserve",
            f"make it {(reserve + 16) * block} or more",
            fatal=True,
        )
    return {
        "path": files.path,
        "revision": files.revision,
        "format": "gguf" if files.gguf else "dummy" if files.folder is None else "safetensors",
        "files": sum(file.stat().st_size for file in files.weight_files()),
        "parameters": facts.parameters,
        "estimated": facts.estimated,
        "dtype": dtype,
        "weights": facts.parameters * item,
        # What a GGUF file holds becomes float32 first.
        "loading": facts.parameters * (4 if files.gguf else item),
        "context": longest,
        "kv": kv,
        "block": block,
        "block_tokens": given.block_tokens,
        "blocks": blocks,
        "reserve": reserve,
    }


def _cached(repository: str, revision: str | None, gguf: str | None) -> Path:
    from shadowsup.workers.transformers import hub

    try:
        return hub.cached(repository, revision, gguf)
    except WorkerError as error:
        raise _NotCached(error.message, error.hint, fatal=True) from error


if __name__ == "__main__":
    sys.exit(main())
