"""transformers, compiled and tuned: the strongest that torch.compile makes of the step.

As transformers_compiled.py, and every product with one row becomes a reduction of the compiler's own,
tuned in place by coordinate descent, as codes that decode at batch 1 ask for; a prompt's products are
the library's. On an H200 this decodes Llama-3.2-1B 1.3 times as fast (benchmarks/results).
"""

from typing import Any, ClassVar

from kog_triton.bench.peers.transformers_compiled import TransformersCompiled


class TransformersTuned(TransformersCompiled):
    name = "transformers-tuned"
    how = f"{TransformersCompiled.how}, coordinate descent"
    step_options: ClassVar[dict[str, Any] | None] = {"coordinate_descent_tuning": True}
