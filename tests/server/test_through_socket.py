"""The command that times the socket beside the engine runs to its end on a CPU; its figure is a GPU's."""

import pytest

from tests.server.through_socket import CLIENTS, measure

CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


@pytest.mark.slow
def test_one_client_and_eight_get_every_token(figure):
    found = measure(CONFIG, "reference", "cpu", 256)
    for count in (1, CLIENTS):
        one = found[f"{count} clients"]
        assert one["through_the_socket"] > 0 and min(one["engine_tokens_per_s"]) > 0
        figure("through the socket", f"{count} clients, reference on a CPU: {one['share']:.1%}")
