"""Faults drawn at random: places of the package that an operator changes, and the tests that ought to notice.

    python tests/faults.py --draw 1 40     forty of them, by seed 1

Each operator makes of a place what a slip of the pen would: a comparison with the wrong edge, `or` for `and`, a sign, a
factor, a number beside the right one, a condition turned around, an argument not passed on, a call left out. All places
of FILES are equally likely. A file's tests are those of AREAS, the first that fits.
"""

import ast
import random
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.planted.fault import Drawn

FORMATS = (
    "host/test_format_fields.py",
    "host/test_formats.py",
    "host/test_formats_refused.py",
    "host/test_formats_packages.py",
)
COMMANDS = ("host/test_command_lines.py", "host/test_cli.py", "host/test_cli_requests.py", "host/test_arguments.py")
REQUESTS = ("host/test_engine.py", "host/test_streaming.py", "host/test_queue.py")
BENCH = (
    "bench/test_bench_values.py",
    "bench/test_bench_tables.py",
    "bench/test_bench_parts.py",
    "bench/test_bench_results.py",
    "bench/test_bench_flags.py",
    "bench/test_bench.py",
)
TEXT = (
    "host/test_text_tokens.py",
    "host/test_text_tokenizer.py",
    "host/test_text_chat.py",
    "host/test_text_detokenize.py",
)
# Of the package, what a random draw is from, and which tests judge it: the first pattern that fits a file.
AREAS: dict[str, tuple[str, ...]] = {
    "plan.py": ("host/test_plan_text.py", "host/test_plan.py", "host/test_scaling.py", "host/test_cli.py"),
    "doctor.py": ("host/test_doctor_values.py", "host/test_doctor.py", "host/test_choose.py", "host/test_cache.py"),
    "cache.py": ("host/test_cache.py",),
    "quantize.py": ("host/test_quantize.py",),
    "generate.py": ("host/test_cli_requests.py", "host/test_cli_talk.py", *COMMANDS),
    "__main__.py": ("host/test_cli_process.py", *COMMANDS),
    "serve.py": (
        "host/test_command_lines.py",
        "host/test_arguments.py",
        "server/test_limits.py",
        "server/test_start_by_value.py",
    ),
    "server/limits.py": ("server/test_limits.py", "server/test_by_value.py"),
    "vllm_names.py": ("host/test_vllm_names.py", "host/test_llm_arguments.py"),
    "llm_arguments.py": ("host/test_llm_arguments.py", "host/test_vllm_names.py"),
    "prompts.py": ("host/test_vllm_names.py", "host/test_vllm_chat.py", "host/test_prompt_logprobs.py"),
    "llm.py": (
        "host/test_engine.py",
        "host/test_vllm_names.py",
        "host/test_vllm_chat.py",
        "host/test_streaming.py",
        "host/test_prompt_logprobs.py",
        "host/test_llm_arguments.py",
        "host/test_conversations.py",
        "host/test_text_stop.py",
    ),
    "engine.py": (*REQUESTS, "host/test_kv_reuse.py", "host/test_quiet.py", "host/test_conversations.py"),
    "generation.py": (*REQUESTS, "host/test_text_stop.py", "host/test_prompt_logprobs.py"),
    "request_queue.py": ("host/test_queue.py", "host/test_engine.py"),
    "outputs.py": ("host/test_engine.py", "host/test_vllm_names.py", "server/test_by_value.py"),
    "cli/interactive.py": ("host/test_cli_talk.py", "host/test_interrupts.py", *COMMANDS),
    "cli/history.py": ("host/test_cli_talk.py",),
    "cli/caches.py": ("host/test_cache.py", *COMMANDS),
    "cli/panics.py": ("host/test_cli_process.py", *COMMANDS),
    "cli/activity.py": ("host/test_cli_requests.py", *COMMANDS),
    "cli/command.py": ("host/test_interrupts.py", "host/test_cli_process.py", *COMMANDS),
    "cli/*.py": (*COMMANDS, "host/test_cli_talk.py", "host/test_cli_process.py"),
    "backends/interrupts.py": ("host/test_deferred_interrupts.py", "host/test_mapped_files.py"),
    "checkpoint/formats/*.py": (*FORMATS, "host/test_checkpoint_values.py", "host/test_quantize.py"),
    "checkpoint/gguf/*.py": ("host/test_gguf_values.py", "host/test_gguf.py", "host/test_gguf_tokenizer.py"),
    "checkpoint/hub.py": ("host/test_checkpoint.py", "host/test_damaged_checkpoint.py"),
    "checkpoint/quantizing.py": ("host/test_checkpoint_values.py", "host/test_quantize.py", *FORMATS),
    "checkpoint/narrow*.py": (
        "host/test_checkpoint_values.py",
        *FORMATS,
        "host/test_quantize.py",
        "bench/test_narrow_weights.py",
    ),
    "checkpoint/*.py": (
        "host/test_checkpoint_values.py",
        "host/test_checkpoint.py",
        "host/test_damaged_checkpoint.py",
        "host/test_mapped_files.py",
        "host/test_families.py",
        "host/test_quantize.py",
        *FORMATS,
    ),
    "text/gguf_tokenizer.py": ("host/test_gguf_tokenizer.py",),
    "text/tokenizer_growth.py": ("host/test_tokenizer_growth.py", *TEXT),
    "text/stop.py": ("host/test_text_stop.py", "host/test_engine.py"),
    "text/grammar.py": ("host/test_grammar.py", "host/test_cli_requests.py"),
    "text/check_grammar.py": ("host/test_grammar.py", "server/test_tool_grammar.py"),
    "text/sandbox.py": ("host/test_text_sandbox.py", "host/test_text_chat.py"),
    "text/*process.py": ("host/test_text_sandbox.py", "host/test_grammar.py", "host/test_text_chat.py"),
    "text/render_template.py": ("host/test_text_tokens.py", "host/test_text_sandbox.py", "host/test_text_chat.py"),
    "text/reasoning.py": ("host/test_answer_parsers.py", "host/test_tool_calls.py"),
    "text/answer.py": ("host/test_answer_parsers.py", "host/test_tool_calls.py"),
    "text/tool_calls.py": ("host/test_tool_calls.py", "host/test_answer_parsers.py"),
    "text/qwen3_coder.py": ("host/test_tool_calls.py", "server/test_tool_grammar.py", "host/test_answer_parsers.py"),
    "text/injection.py": (*TEXT, "host/test_text_sandbox.py"),
    "text/content.py": ("host/test_vllm_chat.py",),
    "text/kept_ids.py": ("host/test_kept_ids.py",),
    "text/*.py": (*TEXT, "host/test_tokenizer_growth.py", "host/test_conversations.py"),
    "sampling/params.py": ("host/test_sampling_params.py", "host/test_vllm_names.py", "host/test_cli.py"),
    "sampling/structured.py": ("host/test_grammar.py", "host/test_sampling_params.py", "host/test_cli_requests.py"),
    "sampling/*.py": (
        "host/test_sampling_definition.py",
        "host/test_sampling_fixed.py",
        "host/test_sampling_edits.py",
        "host/test_sampling_params.py",
    ),
    "bench/table.py": BENCH,
    "bench/record.py": BENCH,
    "bench/show.py": (*BENCH, "bench/test_bench_stages.py", "bench/test_bench_concurrency.py"),
    "bench/check.py": (
        "bench/test_bench_values.py",
        "bench/test_bench_parts.py",
        "bench/test_narrow_weights.py",
        "bench/test_bench.py",
    ),
    "bench/timing.py": (
        "bench/test_bench_values.py",
        "bench/test_bench_parts.py",
        "bench/test_bench_concurrency.py",
        "bench/test_bench_peers.py",
    ),
    "bench/kl_limit.py": (
        "bench/test_bench_values.py",
        "bench/test_bench_parts.py",
        "bench/test_bench_peers.py",
        "bench/test_narrow_weights.py",
    ),
}

EDGES: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


def _operator(sign: str) -> type[ast.AST]:
    (one,) = (node for node in ast.walk(ast.parse(f"a {sign} b")) if isinstance(node, ast.operator))
    return type(one)


SIGNS = {
    _operator(sign): other
    for sign, other in zip(
        ["+", "-", "*", "/", "//", "%", "<<", ">>"], ["-", "+", "/", "*", "*", "+", ">>", "<<"], strict=True
    )
}


def files(package: Path) -> dict[str, tuple[str, ...]]:
    """Files of the package that faults are drawn from, each with its tests."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        pattern = next((p for p in AREAS if fnmatch(name, p) and name.count("/") == p.count("/")), None)
        if pattern and path.name != "__init__.py":
            found[name] = AREAS[pattern]
    return found


def draw(package: Path, seed: int, count: int) -> list[Drawn]:
    """`count` places, without two of one line, in the order in which they were drawn."""
    pool = [
        (name, tests, change)
        for name, tests in files(package).items()
        for change in changes((package / name).read_text())
    ]
    random.Random(seed).shuffle(pool)
    kept: dict[tuple[str, int], Drawn] = {}
    for name, tests, (line, begin, end, now) in pool:
        if len(kept) == count:
            break
        raw = (package / name).read_bytes()
        changed = (raw[:begin] + now.encode() + raw[end:]).decode()
        try:
            ast.parse(changed)
        except SyntaxError:  # a line that ended inside what was taken out
            continue
        before = raw[begin:end].decode()
        kept.setdefault((name, line), Drawn(name, line, before, changed, tests))
    return list(kept.values())


def changes(text: str) -> Iterator[tuple[int, int, int, str]]:
    """Of one file: a change's line, where its bytes begin and end, and what stands there then."""
    raw, starts = text.encode(), [0]
    for one in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(one))
    for node in _live(ast.parse(text)):
        for (first, last), now in _slips(node, lambda n: _source(raw, starts, n)):
            yield first[0], starts[first[0] - 1] + first[1], starts[last[0] - 1] + last[1], now


Place = tuple[tuple[int, int], tuple[int, int]]


def _place(node: ast.expr | ast.stmt | ast.keyword) -> Place:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _source(raw: bytes, starts: list[int], node: ast.expr | ast.stmt | ast.keyword) -> str:
    first, last = _place(node)
    return raw[starts[first[0] - 1] + first[1] : starts[last[0] - 1] + last[1]].decode()


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs: no annotations, texts put together, assertions or what is for type checkers alone."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _live(child)


def _slips(node: ast.AST, source) -> Iterator[tuple[Place, str]]:  # type: ignore[no-untyped-def]
    """What the operators make of one node: where, and what stands there then."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in EDGES:
            right = node.comparators[0]
            yield _place(node), f"(({source(node.left)}) {EDGES[type(op)]} ({source(right)}))"
        case ast.BoolOp():
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield _place(node), "(" + word.join(f"({source(v)})" for v in node.values) + ")"
        case ast.UnaryOp(op=ast.Not()):
            yield _place(node), f"({source(node.operand)})"
        case ast.BinOp() if type(node.op) in SIGNS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield (_place(node), f"(({source(node.left)}) {SIGNS[type(node.op)]} ({source(node.right)}))")
        case ast.Constant(value=bool()):
            yield _place(node), str(not node.value)
        case ast.Constant(value=int()):
            yield _place(node), str(node.value + 1)
        case ast.Constant(value=float()):
            yield _place(node), repr(node.value * 2 + (node.value == 0))
        case ast.If() | ast.IfExp() | ast.While():
            yield _place(node.test), f"(not ({source(node.test)}))"
        case ast.Expr(value=ast.Call()):
            yield _place(node), "pass"
        case ast.Call():
            for word in node.keywords:
                if word.arg not in (None, "help", "metavar"):  # what a usage says is read by people
                    kept = [source(a) for a in (*node.args, *node.keywords) if a is not word]
                    yield _place(node), f"{source(node.func)}({', '.join(kept)})"
