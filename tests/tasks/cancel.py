"""Stop an answer in the middle, leave a loop, drop a stream: the slot is free each time."""

from kog_triton import LLM, SamplingParams

endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
with LLM() as llm:
    stream = llm.stream("def f(", endless)
    said = []
    for delta in stream:
        said.append(delta.text)
        if len(said) == 3:
            stream.cancel()
    assert stream.finish_reason == "abort" and 3 <= len(stream.token_ids) < 900
    for _ in llm.stream("def g(", endless):
        break
    llm.stream("def h(", endless)  # nobody reads it
    short = SamplingParams(temperature=0, max_tokens=4)
    assert len(llm.generate("def f(", short)[0].outputs[0].token_ids) == 4
