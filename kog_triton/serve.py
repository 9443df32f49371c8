"""`kog serve` and `python -m kog_triton.serve`: the OpenAI API, Anthropic's messages, and metrics over HTTP.

Everything is said on stderr, a line at a time. Exit codes: command.py; 0 after a signal, once what ran has ended.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_triton.cli.arguments import Parser, above_zero, natural, not_negative, positive, share
from kog_triton.cli.command import end_process, run
from kog_triton.cli.foreign_flags import of_servers, own_words
from kog_triton.cli.model import add_checkpoint, check_revision
from kog_triton.cli.stderr_log import STDERR_LOG
from kog_triton.errors import RequestError

if TYPE_CHECKING:
    from kog_triton.server.run import Settings

LOCAL = ("127.0.0.1", "localhost", "::1")
NUM_SLOTS = 4  # each holds max_model_len positions: an agent, its helpers, and a chat


def build_parser() -> Parser:
    from kog_triton.backends import PREFILLS, backend_names

    parser = Parser(
        prog="kog serve",
        description="Serve a model over HTTP: OpenAI's API, Anthropic's messages, Prometheus metrics.",
        epilog="Exit codes: 0 ended by a signal, 2 usage, 3 model, 4 device, 5 run.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model")
    what = parser.add_argument_group("model")
    add_checkpoint(what)
    what.add_argument(
        "--served-model-name", nargs="+", default=(), metavar="NAME",
        help="what clients call it; the first is told (default: MODEL as it is given)",
    )  # fmt: skip
    what.add_argument("--max-model-len", type=int, metavar="N", help="positions of a slot")
    what.add_argument(
        "--max-num-seqs", type=positive, default=NUM_SLOTS, metavar="N",
        help=f"slots: requests that run at once, conversations that are kept (default: {NUM_SLOTS})",
    )  # fmt: skip
    what.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE",
        help="of a GPU's memory, what the model may take: more is refused before it loads",
    )  # fmt: skip
    what.add_argument("--dtype", default="auto", help="weights: auto, fp32, bf16 or fp16")
    what.add_argument("--backend", default="auto", help=f"auto, {', '.join(backend_names())}")
    what.add_argument("--device", help="cpu, nvidia, amd or a GPU such as h200")
    what.add_argument(
        "--tensor-parallel-size", "-tp", "--gpus", type=positive, default=1, metavar="N",
        help="how many GPUs (default: 1)",
    )  # fmt: skip
    what.add_argument(
        "--prefill", default="auto", choices=PREFILLS,
        help="prompts in the backend's kernel, by torch's matrix products, or whichever is faster",
    )  # fmt: skip
    what.add_argument("--blocks", type=positive, metavar="N", help="of a GPU (hip only; MI300X: 256, up to 304)")
    what.add_argument("--seed", type=int, help="make a session repeatable")
    where = parser.add_argument_group("address")
    where.add_argument("--host", default="127.0.0.1", help="(default: this machine alone)")
    where.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    where.add_argument("--uds", type=Path, help="a socket file instead of host and port")
    where.add_argument("--api-key", nargs="+", default=None, metavar="KEY", help="(default: $KOG_API_KEY)")
    chat = parser.add_argument_group("conversations")
    chat.add_argument("--chat-template", metavar="FILE|TEXT", help="instead of the model's own")
    chat.add_argument(
        "--default-chat-template-kwargs", metavar="JSON", default="{}",
        help='what the template takes where a request does not say, such as \'{"enable_thinking": false}\'',
    )  # fmt: skip
    chat.add_argument(
        "--tool-call-parser", default="auto", help="auto, none, hermes, llama3_json, mistral, qwen3_coder"
    )
    chat.add_argument("--reasoning-parser", default="auto", help="auto, none, think")
    chat.add_argument("--enable-auto-tool-choice", action="store_true", help="always on; taken for vLLM's sake")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-num-queued-reqs", type=int, metavar="N", help="beyond the slots (default: 4 a slot, at least 8)"
    )
    limits.add_argument(
        "--shutdown-timeout", type=not_negative, default=30.0, metavar="S",
        help="that what runs may take after a first SIGTERM (default: 30)",
    )  # fmt: skip
    limits.add_argument(
        "--sse-keep-alive-interval", type=not_negative, default=15.0, metavar="S",
        help="of silence in a stream, after which a comment is sent; 0 for none (default: 15)",
    )  # fmt: skip
    limits.add_argument(
        "--engine-timeout", type=above_zero, metavar="S",
        help="without a sign of the engine (default: 5 on a GPU, 60 on a CPU)",
    )  # fmt: skip
    limits.add_argument(
        "--stream-interval", type=natural, default=0, metavar="N",
        help="tokens an event; 0: by time (default: 0)",
    )  # fmt: skip
    limits.add_argument(
        "--stream-interval-ms", type=not_negative, default=10.0, metavar="MS", help="between events (default: 10)"
    )
    return parser


def parse(argv: Sequence[str] | None) -> "Settings":
    """The settings; RequestError for what cannot be."""
    parser = build_parser()
    own = {flag for action in parser._actions for flag in action.option_strings}
    args = parser.parse_args(own_words(parser, argv, of_servers(own)))
    if args.model is not None and args.model_tag is not None:
        parser.error("MODEL and --model name a model each: leave out one")
    check_revision(args.model or args.model_tag, args.revision)
    if ":" in (args.device or ""):
        parser.error(f"--device {args.device}: a number of GPUs is --tensor-parallel-size")
    if not 0 <= args.port < 1 << 16:
        parser.error(f"--port {args.port}: ports run from 0 to 65535")
    if args.max_num_queued_reqs is not None and args.max_num_queued_reqs < 0:
        parser.error("--max-num-queued-reqs must be 0 or more")
    if args.api_key is not None and not all(args.api_key):
        parser.error("--api-key is empty: give a key, or leave the flag out")
    if not all(args.served_model_name):
        parser.error("--served-model-name is empty: give a name, or leave the flag out")
    try:
        import uvloop  # noqa: F401  what `_body` needs is missed here too

        from kog_triton.server.pacing import Interval
        from kog_triton.server.run import Settings
        from kog_triton.text.answer import check_parsers
    except ModuleNotFoundError as error:
        raise RequestError(f"kog serve needs {error.name}: pip install 'kog-triton[serve]'") from error
    check_parsers(args.tool_call_parser, args.reasoning_parser)
    keys = args.api_key if args.api_key is not None else [os.environ.get("KOG_API_KEY", "")]
    return Settings(
        llm={
            "model": args.model or args.model_tag,
            "revision": args.revision,
            "backend": args.backend,
            "devices": f"{args.device or ''}:{args.tensor_parallel_size}",
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "num_slots": args.max_num_seqs,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "seed": args.seed,
            "prefill": args.prefill,
            "num_blocks": args.blocks,
        },
        host=args.host,
        port=args.port,
        uds=args.uds,
        keys=tuple(key for key in keys if key),
        names=tuple(args.served_model_name),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        chat_template=_template(args.chat_template),
        template_kwargs=_kwargs(args.default_chat_template_kwargs),
        max_queued=args.max_num_queued_reqs,
        interval=Interval(args.stream_interval_ms / 1e3, args.stream_interval),
        keep_alive_s=args.sse_keep_alive_interval,
        drain_s=args.shutdown_timeout,
        silent_s=args.engine_timeout,
    )


def _template(said: str | None) -> str | None:
    if said is None or "{" in said:
        return said
    try:
        return Path(said).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--chat-template {said}: cannot be read: {error}") from error


def _kwargs(said: str) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except ValueError as error:
        raise RequestError(f"--default-chat-template-kwargs: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError("--default-chat-template-kwargs must be a JSON object")
    return found


def _body(argv: Sequence[str] | None) -> int:
    settings = parse(argv)
    logger = logging.getLogger("kog_triton")
    logger.addHandler(STDERR_LOG)
    logger.setLevel(logging.INFO)
    if settings.host not in LOCAL and settings.uds is None and not settings.keys:
        logger.warning("%s is open to others and has no --api-key", settings.host)
    from kog_triton.server.arenas import few_arenas

    few_arenas()
    import uvloop

    from kog_triton.server.run import serve

    return uvloop.run(serve(settings))


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
