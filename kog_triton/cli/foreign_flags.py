"""Flags that `kog generate` and `kog serve` have under other names, or have not, said by name: of llama.cpp and mlx_lm,
and for the server of vLLM, whose arguments vllm_names.py knows.
"""

from collections.abc import Collection, Mapping, Sequence

from kog_triton.vllm_names import IGNORED, names
from kog_triton.vllm_names import INSTEAD as OF_VLLM

WHOLE = "leave it out: a model is in a GPU whole, or not at all"
THREADS = "set the environment variable OMP_NUM_THREADS"
MERGE = "merge the adapter into the checkpoint"
PROXY = "put a proxy in front of the server"
SILENT = "leave it out: requests are not logged"
INSTEAD = {
    "--adapter-path": MERGE,
    "--chat-template-config": "--chat-template-kwargs JSON",
    "--chat-template-file": "--chat-template FILE",
    "--conversation": "--interactive",
    "--ctx-size": "--max-model-len N",
    "--extra-eos-token": "--stop TEXT",
    "--file": "-p @FILE",
    "--gpu-layers": WHOLE,
    "--grammar-file": "--grammar FILE",
    "--hf-repo": "--model org/name",
    "--ignore-chat-template": "leave it out: without --chat there is none",
    "--lora": MERGE,
    "--max-kv-size": "--max-model-len N",
    "--model-path": "--model",
    "--n-gpu-layers": WHOLE,
    "--n-predict": "-m N",
    "--predict": "-m N",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system TEXT",
    "--tensor-parallel-size": "--gpus N",
    "--threads": THREADS,
    "-c": "--max-model-len N",
    "-cnv": "--interactive",
    "-f": "-p @FILE",
    "-hf": "--model org/name",
    "-i": "--interactive",
    "-j": "--json-schema",
    "-n": "-m N",
    "-ngl": WHOLE,
    "-s": "--seed N",
    "-sys": "--system TEXT",
    "-t": THREADS,
    "-tp": "--gpus N",
}


SERVERS = {
    "--adapter-path": MERGE,
    "--alias": "--served-model-name NAME",
    "--allow-credentials": PROXY,
    "--allowed-headers": PROXY,
    "--allowed-methods": PROXY,
    "--allowed-origins": PROXY,
    "--api-key-file": "--api-key KEY, or the environment variable KOG_API_KEY",
    "--api-server-count": "leave it out: one process speaks HTTP",
    "--ctx-size": "--max-model-len N",
    "--data-parallel-size": "run a server on each GPU",
    "--disable-log-requests": SILENT,
    "--disable-uvicorn-access-log": SILENT,
    "--enable-log-requests": "requests are not logged: /metrics counts them",
    "--enable-per-request-metrics": "leave it out: every answer has timings",
    "--enable-prompt-tokens-details": "leave it out: usage always tells cached_tokens",
    "--enable-request-id-headers": "leave it out: an answer's id is in its body",
    "--flash-attn": "leave it out: there is one attention",
    "--gpu-layers": WHOLE,
    "--h11-max-header-count": "leave it out: 256 headers are taken",
    "--h11-max-incomplete-event-size": "leave it out: 64 KiB of headers are taken",
    "--hf-repo": "--model org/name",
    "--jinja": "leave it out: a model's own chat template is always used",
    "--lora": MERGE,
    "--lora-modules": MERGE,
    "--metrics": "leave it out: /metrics is always there",
    "--middleware": PROXY,
    "--model-path": "--model",
    "--n-gpu-layers": WHOLE,
    "--parallel": "--max-num-seqs N",
    "--pipeline-parallel-size": "--tensor-parallel-size N",
    "--response-role": "leave it out: answers are the assistant's",
    "--root-path": PROXY,
    "--ssl-ca-certs": PROXY,
    "--ssl-certfile": PROXY,
    "--ssl-keyfile": PROXY,
    "--threads": THREADS,
    "--trust-request-chat-template": "leave it out: no request brings a template of its own",
    "--uvicorn-log-level": SILENT,
    "-c": "--max-model-len N",
    "-fa": "leave it out: there is one attention",
    "-hf": "--model org/name",
    "-m": "--model",
    "-ngl": WHOLE,
    "-np": "--max-num-seqs N",
    "-t": THREADS,
}


def of_servers(own: Collection[str]) -> dict[str, str]:
    """What there is instead of each flag of `vllm serve`, llama-server and mlx_lm.server that is not among `own`."""
    found = {}
    for name in (*names()["LLM"], *IGNORED["LLM"], *OF_VLLM["LLM"]):
        ignored = IGNORED["LLM"].get(name)
        instead = OF_VLLM["LLM"].get(name, "leave it out")
        found["--" + name.replace("_", "-")] = f"leave it out: {ignored}" if ignored else instead
    found |= SERVERS
    return {flag: instead for flag, instead in found.items() if flag not in own}


def foreign_flag(words: Sequence[str], table: Mapping[str, str] = INSTEAD) -> str | None:
    """What to say of the first of the table's flags among the words of a command line.

    None of them can be another flag's value: those that begin with - are given as FLAG=VALUE.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag in table:
            instead = table[flag]
            is_ours = instead.startswith("-")
            return f"{flag} is {instead} here" if is_ours else f"there is no {flag}: {instead}"
    return None
