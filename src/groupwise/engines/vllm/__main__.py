"""``python -m groupwise.engines.vllm MODEL``: a vLLM that samples for a trainer elsewhere. Runs in vLLM's environment, with groupwise's
source on the path: of groupwise's own requirements it needs pydantic and safetensors alone, which vLLM brings.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from groupwise.engines.vllm.protocol import SECRET
from groupwise.errors import ConfigError, GroupwiseError, ModelError, TrainingError, printable
from groupwise.listening import listening_error

if TYPE_CHECKING:
    from groupwise.engines.vllm.backend import VllmBackend
    from groupwise.engines.vllm.server import Server

__all__ = ["main"]

PORT = 8300
_PROGRAM = "python -m groupwise.engines.vllm"
_HELP = f"""Serve a model by vLLM to a run of groupwise, which sends it the policy's weights after every update.

It runs in vLLM's environment, with groupwise's source on PYTHONPATH, and works for one run at a time. Server and run share a secret:
{SECRET} on both sides, or the file ~/.cache/groupwise/vllm-secret, which the first server makes. It travels unencrypted.
"""
_EXAMPLES = f"""examples:
  {_PROGRAM} Qwen/Qwen2.5-0.5B-Instruct
  {_PROGRAM} models/qwen-7b --host 0.0.0.0 --tensor-parallel 4
  VLLM_CPU_OMP_THREADS_BIND=0-1 {_PROGRAM} ~/.cache/groupwise/models/MODEL --cache-gib 1 --eager

and in the trainer's environment, once it says that it samples:
  groupwise train gsm8k-0.5b rollout.engine=vllm rollout.vllm.url=http://127.0.0.1:{PORT}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, _stop)
    try:
        _serve(_parser().parse_args(arguments))
    except GroupwiseError as error:
        if os.environ.get("GROUPWISE_DEBUG") == "1":
            raise
        print(f"groupwise: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except _StoppedError as stopped:
        print(f"groupwise: the server was stopped by {signal.Signals(stopped.number).name}", file=sys.stderr)
    return 0


def _serve(args: argparse.Namespace) -> None:
    """Serve; what can be wrong is looked for first, before torch and vLLM are imported."""
    from groupwise.engines.vllm.protocol import check_versions

    remark = check_versions()
    if remark:
        _say(remark)
    _check_numbers(args)
    if args.shared_folder is not None and not args.shared_folder.is_dir():
        raise ConfigError(
            f"--shared-folder is {str(args.shared_folder)!r}, which is no folder: make it, where trainer and server see it"
        )
    model = _checked_model(args.model)
    server = _listen(args.host, args.port)
    try:
        _say(f"vLLM loads {model}; until it has, {server.url} tells who asks to wait")
        backend = _start_vllm(args, model)
        from groupwise.engines.vllm.service import Service

        server.open(Service(backend, shared=args.shared_folder, where=server.url, tell=_say))
        about = backend.about()
        _say(f"{about['backend']} samples {about['model']} ({about['dtype']}) at {server.url}")
        backend.broken.wait()
        raise TrainingError(f"{backend.end}, as its own lines above say: start this server again, the trainer waits for it")
    finally:
        server.close()


def _listen(host: str, port: int) -> Server:
    """The port is had before the minutes that vLLM needs to start, and kept."""
    from groupwise.engines.vllm.server import Server

    try:
        return Server(None, host, port)
    except (OSError, OverflowError) as error:
        raise listening_error(error, host, port) from error


def _start_vllm(args: argparse.Namespace, model: str) -> VllmBackend:
    from groupwise.engines.vllm.backend import VllmBackend, VllmOptions

    options = VllmOptions(
        model=model, dtype=args.dtype, max_model_tokens=args.max_model_tokens, max_sequences=args.max_sequences,
        memory_share=args.gpu_memory_share, cache_gib=args.cache_gib, tensor_parallel=args.tensor_parallel, eager=args.eager,
        block_tokens=args.block_tokens, sleeps=args.sleep_mode, adapter_rank=args.adapters,
    )  # fmt: skip
    return VllmBackend(options, own_process=True)


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number that cannot be meant."""
    smallest = {"max_model_tokens": 2, "max_sequences": 1, "tensor_parallel": 1, "block_tokens": 1, "port": 0}
    for name, minimum in smallest.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but it must be at least {minimum}")
    if args.port > 65535:
        raise ConfigError(f"--port is {args.port}, but ports end at 65535")
    if not 0 < args.gpu_memory_share <= 1:
        raise ConfigError(f"--gpu-memory-share is {args.gpu_memory_share}, but it is a share: above 0 and at most 1")
    if args.cache_gib is not None and args.cache_gib <= 0:
        raise ConfigError(f"--cache-gib is {args.cache_gib}, but it must be above 0")


def _checked_model(model: str) -> str:
    """What vLLM is to load. Raises ModelError for what is no model, or one whose weights cannot be replaced."""
    from groupwise.models.folder import check_folder, is_folder_name

    if model == "smollm2-135m-instruct":  # a folder, once it was fetched; its making needs packages that vLLM may not bring
        try:
            from groupwise.models.embedded import ensure_embedded_model
        except ImportError as error:
            raise ConfigError(
                f"{model} is unpacked with {error.name}, which is missing here: name its folder, as `groupwise train quickstart --dry-run "
                f"rollout.engine=vllm rollout.vllm.url=http://127.0.0.1:{PORT}` does"
            ) from error
        model = str(ensure_embedded_model(_say))
    if not is_folder_name(model):
        from groupwise.models.folder import only_from_cache

        only_from_cache(model, None)
        return model
    folder = Path(model).expanduser()
    check_folder(folder)
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        raise ModelError(
            f"the model in {folder} is quantised, but plain weights are what the trainer sends: name the model that it was made of"
        )
    return str(folder)


def _say(sentence: str) -> None:
    # A trainer's name comes from another machine.
    print(f"groupwise: {printable(sentence)}", flush=True)


class _StoppedError(BaseException):
    """A signal came: raised wherever the server is just then."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, frame: FrameType | None) -> None:
    raise _StoppedError(number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: `{_PROGRAM} --help` has the options")


def _parser() -> argparse.ArgumentParser:
    out = _Parser(prog=_PROGRAM, description=_HELP, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument(
        "model",
        metavar="MODEL",
        help="model folder or Hub name: the one that is trained (its weights are replaced by the trainer's)",
    )
    reached = out.add_argument_group("where it is reached")
    reached.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine alone; 0.0.0.0: all)"
    )
    reached.add_argument("--port", type=int, default=PORT, help="(%(default)s; 0: a free one)")
    reached.add_argument(
        "--shared-folder", type=Path, metavar="FOLDER", help="where the trainer may put weights in place of sending"
    )
    how = out.add_argument_group("how it computes")
    how.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="as model.dtype (%(default)s)"
    )
    how.add_argument("--max-model-tokens", type=int, metavar="N", help="prompt and completion together (the model's context)")
    how.add_argument("--max-sequences", type=int, default=256, metavar="N", help="completions decoded at once (%(default)s)")
    how.add_argument(
        "--gpu-memory-share", type=float, default=0.9, metavar="X", help="of the GPU's memory, weights included (%(default)s)"
    )
    how.add_argument("--cache-gib", type=float, metavar="X", help="memory for keys and values, in place of what the share leaves")
    how.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that one model is divided over (%(default)s)"
    )
    how.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens in a block of the prefix cache (vLLM's choice; CPU: 32)"
    )
    how.add_argument(
        "--sleep-mode",
        action="store_true",
        help="on the GPU that the run learns on: hand memory back while it does (not with ahead)",
    )
    how.add_argument(
        "--adapters", type=int, metavar="RANK", choices=(8, 16, 32, 64, 128, 256, 320, 512),
        help="take adapters of up to this rank alone, once the base was sent, in place of merged weights",
    )  # fmt: skip
    how.add_argument("--eager", action="store_true", help="no compilation: up in seconds, and slower")
    return out


if __name__ == "__main__":
    raise SystemExit(main())
