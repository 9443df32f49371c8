"""The names of vLLM's parameters, read out of a wheel of vLLM's that is never installed or imported.

    pip download --no-deps vllm==0.33.0 -d /tmp/wheel
    python -m tests.lib.vllm_names /tmp/wheel/vllm-*.whl

writes kog_triton/vllm_names.json: names alone, a list a function or class, the methods of LLM, and what the package
exports.
"""

import ast
import sys
import zipfile
from pathlib import Path

from kog_triton.json_file import in_lines
from tests import ROOT

MIXINS = {  # where LLM has methods from
    "entrypoints/generate/beam_search/offline.py": "BeamSearchOfflineMixin",
    "entrypoints/pooling/offline.py": "PoolingOfflineMixin",
    "entrypoints/rl/offline.py": "RLOfflineMixin",
}
TABLE = ROOT / "kog_triton" / "vllm_names.json"


def names_of(read):
    """{function or class: its parameters or fields}; `read` gives the text of a file of the package."""
    llm, engine = class_of(read("entrypoints/llm.py"), "LLM"), read("engine/arg_utils.py")
    sampling, outputs, inputs = (read(f"{name}.py") for name in ("sampling_params", "outputs", "inputs/llm"))
    prompts = [
        field
        for name in ("_PromptOptions", "TextPrompt", "TokensPrompt")
        for field in fields_of(class_of(inputs, name))
    ]
    mixins = [methods_of(class_of(read(file), name)) for file, name in MIXINS.items()]
    package = constant_of(read("__init__.py"), "MODULE_ATTRS")
    return {
        "vllm": list(package),
        "LLM methods": merged(methods_of(llm), *mixins),
        # its **kwargs are those of EngineArgs
        "LLM": merged(arguments_of(llm, "__init__"), fields_of(class_of(engine, "EngineArgs"))),
        "LLM.generate": arguments_of(llm, "generate"),
        "LLM.chat": arguments_of(llm, "chat"),
        "prompt": merged(prompts),
        "SamplingParams": fields_of(class_of(sampling, "SamplingParams")),
        "SamplingParams.from_optional": arguments_of(class_of(sampling, "SamplingParams"), "from_optional"),
        "StructuredOutputsParams": fields_of(class_of(sampling, "StructuredOutputsParams")),
        "RequestOutput": arguments_of(class_of(outputs, "RequestOutput"), "__init__"),
        "CompletionOutput": fields_of(class_of(outputs, "CompletionOutput")),
        "Logprob": fields_of(class_of(read("logprobs.py"), "Logprob")),
    }


def merged(*lists):
    return list(dict.fromkeys(name for names in lists for name in names))


def constant_of(text, name):
    """The value of an assignment at the top of a file."""
    found = (n for n in ast.parse(text).body if isinstance(n, ast.Assign))
    return next(ast.literal_eval(n.value) for n in found if n.targets[0].id == name)


def class_of(text, name):
    return next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)


def fields_of(node):
    """Annotated names of a class, without those that are its own business."""
    found = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
    return [name for name in found if not name.startswith("_")]


def methods_of(node):
    names = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")]


def arguments_of(node, function):
    """Parameters of a method, without self and **kwargs."""
    of = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == function)
    named = [a.arg for a in [*of.args.posonlyargs, *of.args.args, *of.args.kwonlyargs]]
    return [name for name in named if name != "self"]


def main(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = names_of(lambda path: files.read(f"vllm/{path}").decode())
    table = {"vllm": Path(wheel).name.split("-")[1], "names": names}
    TABLE.write_text(in_lines(table, 2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
