"""Flags of llama.cpp and mlx_lm that `kog generate` has under other names, or has not: said by name."""

from collections.abc import Sequence

INSTEAD = {
    "--adapter-path": "merge the adapter into the checkpoint",
    "--chat-template-config": "--chat-template-kwargs JSON",
    "--chat-template-file": "--chat-template FILE",
    "--conversation": "--interactive",
    "--ctx-size": "--max-model-len N",
    "--extra-eos-token": "--stop TEXT",
    "--file": "-p @FILE",
    "--gpu-layers": "leave it out: a model is in a GPU whole, or not at all",
    "--grammar-file": "--grammar FILE",
    "--hf-repo": "--model org/name",
    "--ignore-chat-template": "leave it out: without --chat there is none",
    "--lora": "merge the adapter into the checkpoint",
    "--max-kv-size": "--max-model-len N",
    "--model-path": "--model",
    "--n-gpu-layers": "leave it out: a model is in a GPU whole, or not at all",
    "--n-predict": "-m N",
    "--predict": "-m N",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system TEXT",
    "--tensor-parallel-size": "--gpus N",
    "--threads": "set the environment variable OMP_NUM_THREADS",
    "-c": "--max-model-len N",
    "-cnv": "--interactive",
    "-f": "-p @FILE",
    "-hf": "--model org/name",
    "-i": "--interactive",
    "-j": "--json-schema",
    "-n": "-m N",
    "-ngl": "leave it out: a model is in a GPU whole, or not at all",
    "-s": "--seed N",
    "-sys": "--system TEXT",
    "-t": "set the environment variable OMP_NUM_THREADS",
    "-tp": "--gpus N",
}


def foreign_flag(words: Sequence[str]) -> str | None:
    """What to say of the first of these flags among the words of a command line.

    None of them can be another flag's value: those that begin with - are given as FLAG=VALUE.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag in INSTEAD:
            instead = INSTEAD[flag]
            is_ours = instead.startswith("-")
            return f"{flag} is {instead} here" if is_ours else f"there is no {flag}: {instead}"
    return None
