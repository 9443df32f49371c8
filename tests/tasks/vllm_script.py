"""Run a script written for vLLM: only the name of the package is another."""

import warnings

from kog_triton import LLM, SamplingParams, StructuredOutputsParams, TokensPrompt  # "from vllm" it said
from kog_triton.demo import checkpoint_path

ignored = warnings.catch_warnings(record=True)
said = ignored.__enter__()

# ---- the script ----

MODEL = str(checkpoint_path())
prompts = ["def add(a, b):", "class Stack:", "import os"]
sampling_params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
llm = LLM(
    model=MODEL, tensor_parallel_size=1, max_num_seqs=4, max_model_len=256, dtype="auto", seed=0,
    trust_remote_code=True, enforce_eager=True, gpu_memory_utilization=0.9, disable_log_stats=True,
    quantization=None,
)  # fmt: skip
outputs = llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
for output in outputs:
    assert output.finished and output.request_id and output.prompt in prompts
    for completion in output.outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {completion.text!r}")
        assert completion.finish_reason in ("stop", "length") and completion.finished()
defaults = llm.get_default_sampling_params()
defaults.max_tokens = 4
llm.chat(
    [{"role": "user", "content": "hi"}],
    defaults,
    use_tqdm=False,
    chat_template="{{ messages[0]['content'] }}",
    chat_template_kwargs={"enable_thinking": False},
)
ids = llm.get_tokenizer().encode("x = 1")
assert llm.generate({"prompt_token_ids": ids}, defaults)[0].prompt_token_ids == ids

scored = SamplingParams(max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=1)
(output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], scored)
assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
for token, shown in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
    assert shown[token].rank == 1 and shown[token].decoded_token is not None
shaped = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["Yes", "No"]))
assert llm.generate("Is it? ", shaped)[0].outputs[0].text in ("Yes", "No")
parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]
template = "{{ messages[0]['content'] + ' ' }}"
(output,) = llm.chat([{"role": "user", "content": parts}], defaults, chat_template=template)
assert output.prompt == "What\nnow? "

# ---- what it was told ----

told = {str(warning.message).split()[1] for warning in said if warning.category is UserWarning}
assert told == {"trust_remote_code", "enforce_eager", "gpu_memory_utilization"}, told
try:
    LLM(MODEL, quantization="awq")
except ValueError as error:
    assert "quantization is 'awq'" in str(error), error
else:
    raise AssertionError("what is not supported was dropped")
refused = {
    "there is no beam search": lambda: llm.beam_search([{"prompt": "x"}], None),
    "merge the adapter": lambda: llm.generate("x", lora_request=object()),
    "tensor_parallel_size is the number": lambda: LLM(MODEL, pipeline_parallel_size=2),
    "StructuredOutputsParams(json=": lambda: SamplingParams(guided_decoding={"json": {}}),
    "models read text alone": lambda: llm.chat(
        [{"role": "user", "content": [{"type": "image_url"}]}], chat_template=template
    ),
}
for says, call in refused.items():
    try:
        call()
    except (ValueError, AttributeError) as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"not refused: {says}")
