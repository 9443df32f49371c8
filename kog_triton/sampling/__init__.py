"""How the next token is chosen: parameters, random numbers and the definition every backend obeys.

params       what a caller may ask for, validated
structured   what an answer must look like
philox       counter-based random words
fixed        integer logarithms and exponentials, equal bit for bit everywhere
history      what the penalties and bad words look back on
definition   logits, parameters and history in; one token out
"""

from kog_triton.sampling.definition import Sampled, rank_of, raw_logprobs, sample
from kog_triton.sampling.history import History
from kog_triton.sampling.params import SamplingParams
from kog_triton.sampling.structured import StructuredOutputsParams

__all__ = ["History", "Sampled", "SamplingParams", "StructuredOutputsParams", "rank_of", "raw_logprobs", "sample"]
