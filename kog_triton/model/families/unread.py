"""Fields of a config.json that nothing reads.

What is known to change the model is refused (decoder.py). Of what is not known a user is told by name, since a model
with one more field may be another function; but not of fields that are empty, or known to say nothing about it.
"""

from collections.abc import Mapping
from typing import Any

from kog_triton.errors import printable, shown
from kog_triton.model.config import MAX_LABEL, Config
from kog_triton.model.families import find_family

# Of training, of another program's code, of how its caller wants the output; ids of tokens; what generate would take
# where there is no generation_config.json; and, last, what only some values of another field make read.
_WORDS = """
architectures attention_dropout attention_probs_dropout_prob attn_dropout attn_implementation attn_pdrop auto_map
cache_implementation chunk_size_feed_forward dtype embd_pdrop finetuning_task hidden_dropout hidden_dropout_prob
id2label init_std initializer_range is_decoder is_llama_config keys_to_ignore_at_inference label2id mlp_dropout
model_type output_attentions output_hidden_states output_past output_router_logits output_scores pretraining_tp
problem_type remove_invalid_values tf_legacy_loss tie_encoder_decoder
pruned_heads quantization_config resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef summary_type
task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed
unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attn use_sdpa
begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id
pad_token_id sep_token_id suppress_tokens unk_token_id
bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size num_beam_groups num_beams
num_return_sequences repetition_penalty temperature top_k top_p typical_p
max_window_layers original_max_position_embeddings sliding_window
"""
_SAY_NOTHING = frozenset(_WORDS.split())
_EMPTY: tuple[object, ...] = (None, "", [], {})


def unread_fields(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each field that nothing reads and that may mean something, of a config.json whose spec can be read."""
    config = Config(values)
    find_family(values).spec(config)
    known = config.read | _SAY_NOTHING
    return tuple(
        f"config.json: {printable(name)[:MAX_LABEL]} {shown(value)} is ignored: no such field is known"
        for name, value in values.items()
        if value not in _EMPTY and name not in known and not name.startswith("_")
    )
