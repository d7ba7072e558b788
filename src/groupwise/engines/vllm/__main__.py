"""``python -m groupwise.engines.vllm MODEL``: a vLLM that samples for a trainer elsewhere. Runs in vLLM's environment, with groupwise's
source on the path: of groupwise's own requirements it needs pydantic and safetensors alone, which vLLM brings.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from groupwise.errors import ConfigError, GroupwiseError, TrainingError

__all__ = ["main"]

PORT = 8300


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    args = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        _serve(args)
    except GroupwiseError as error:
        print(f"groupwise: {error}", file=sys.stderr)
        return error.exit_code
    except (SystemExit, KeyboardInterrupt):
        return 0
    return 0


def _serve(args: argparse.Namespace) -> None:
    from groupwise.engines.vllm.server import Server
    from groupwise.engines.vllm.service import Service
    from groupwise.engines.vllm.versions import check_versions

    remark = check_versions()
    if remark:
        print(f"groupwise: {remark}", file=sys.stderr)
    if args.shared_folder is not None and not args.shared_folder.is_dir():
        raise ConfigError(
            f"--shared-folder is {str(args.shared_folder)!r}, which is no folder: make it, where trainer and server see it"
        )
    from groupwise.engines.vllm.backend import VllmBackend, VllmOptions

    options = VllmOptions(
        model=_folder(args.model), dtype=args.dtype, max_model_tokens=args.max_model_tokens, max_sequences=args.max_sequences,
        memory_share=args.gpu_memory_share, cache_gib=args.cache_gib, tensor_parallel=args.tensor_parallel, eager=args.eager,
        block_tokens=args.block_tokens,
    )  # fmt: skip
    backend = VllmBackend(options, own_process=True)
    try:
        server = Server(Service(backend, shared=args.shared_folder), args.host, args.port)
    except OSError as error:
        backend.close()
        raise ConfigError(f"the port {args.port} of {args.host} cannot be had ({error}): choose another with --port") from error
    about = server.service.hello()
    print(f"groupwise: {about['backend']} samples {about['model']} ({about['dtype']}) at {server.url}", flush=True)
    try:
        backend.broken.wait()
        raise TrainingError("vLLM broke down, as its own lines above say: start this server again, the trainer waits for it")
    finally:
        server.close()


def _folder(model: str) -> str:
    """The built-in model is a folder, once it was fetched; its making needs a package that vLLM does not bring."""
    if model != "smollm2-135m-instruct":
        return model
    try:
        from groupwise.models.embedded import ensure_embedded_model
    except ImportError as error:
        raise ConfigError(f"{model} needs a package that is missing here ({error.name}): name its folder instead") from error
    return str(ensure_embedded_model())


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m groupwise.engines.vllm", description=(__doc__ or "").replace("``", "`"))
    out.add_argument(
        "model", help="model folder or Hub name: the one that is trained (its weights are replaced by the trainer's)"
    )
    out.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for other machines (a network you trust)")
    out.add_argument("--port", type=int, default=PORT)
    out.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="the trainer's model.dtype")
    out.add_argument("--max-model-tokens", type=int, help="prompt and completion together; by default the model's context")
    out.add_argument("--max-sequences", type=int, default=256, help="completions decoded at once")
    out.add_argument("--gpu-memory-share", type=float, default=0.9, help="of the GPU's memory, weights included")
    out.add_argument("--cache-gib", type=float, help="memory for keys and values, in place of the share's rest")
    out.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that one model is divided over")
    out.add_argument("--block-tokens", type=int, help="tokens of a block of the prefix cache")
    out.add_argument("--shared-folder", type=Path, help="where the trainer may put weights in place of sending them")
    out.add_argument("--eager", action="store_true", help="no compilation: up in seconds, and slower")
    return out


if __name__ == "__main__":
    raise SystemExit(main())
