"""A narrow embedding in the CUDA kernels: bit for bit what its values are as 16 bits, and in the bytes of its codes."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.memory import plan_of
from kog_triton.backends.embedding import Embedding
from kog_triton.schedule.embedding import embedding_bytes, embedding_row
from tests.lib.cuda_requests import PROMPTS, request, run
from tests.lib.cuda_walk import ChunkBackend, ColumnBackend, FiberBackend
from tests.lib.narrow_embedding import CASES, HALF, lanes_of, pair
from tests.lib.slow import some_always

COUNT, BLOCKS = 4, 4


def assert_same(ours, theirs, slots=1):
    """Tokens, keys, values and the last logits."""
    requests = [request(slot, PROMPTS[slot], COUNT) for slot in range(slots)]
    assert run(ours, *requests) == run(theirs, *requests)
    assert ours.memory.cache.any() and ours.memory.cache.equal(theirs.memory.cache)
    assert ours.memory.logits.equal(theirs.memory.logits)


@pytest.mark.parametrize("case", some_always(CASES, "int4 g32, minimums (Q4_1)", "int4 channels", "fp8 blocks"))
def test_a_token_has_the_values_of_its_row(case):
    narrow, wide = (FiberBackend(weights, BackendOptions(), BLOCKS) for weights in pair(case))
    spec, vocab = narrow.spec, narrow.spec.vocab_size
    row, table = embedding_row(spec), narrow.memory.embed.view(torch.uint8)
    assert row and table.shape == (vocab, row.bytes) and row.bytes < 2 * spec.hidden_size
    assert table.nbytes == embedding_bytes(spec)
    plans = [plan_of(b.layout, 1).weights for b in (narrow, wide)]
    assert plans[1] - plans[0] == wide.memory.embed.nbytes - table.nbytes
    want = wide.memory.embed.float()
    rows = Embedding(table, HALF[spec.dtype], row).rows(torch.arange(vocab))
    assert rows.equal(want[:, : spec.hidden_size])
    assert len({*map(tuple, want.tolist())}) == vocab
    for token in (0, 1, vocab - 1):
        given = {"token_ids": torch.tensor([token])}
        assert narrow.run_stage("embed", 0, given)["x"].cpu().flatten().equal(rows[token])
    assert_same(narrow, wide)


@pytest.mark.parametrize("case", some_always(["int8 g32 (Q8_0)", "int4 g32, minimums (Q4_1)"], "int8 g32 (Q8_0)"))
def test_requests_that_share_steps(case):
    options = BackendOptions(num_slots=2)
    backends = (ColumnBackend(w, options, BLOCKS, counts=(2,)) for w in pair(case))
    assert_same(*backends, slots=2)


@pytest.mark.parametrize("case", some_always(["int8 g32 (Q8_0)", "mxfp4"], "mxfp4"))
def test_a_prompt_in_chunks(case):
    ours, theirs = (ChunkBackend(w, BackendOptions(), BLOCKS) for w in pair(case))
    assert_same(ours, theirs)


def test_a_prompt_by_matrix_products():
    options = BackendOptions(prefill="library")
    ours, theirs = (FiberBackend(w, options, BLOCKS) for w in pair("int4 g32 (Q4_0)"))
    assert_same(ours, theirs)


def test_lanes_begin_with_one_row():
    weights = lanes_of("fp8 blocks")
    assert_same(*(FiberBackend(w, BackendOptions(), BLOCKS) for w in weights))


def test_a_row_that_has_no_whole_quads_is_refused_by_its_size():
    weights, _ = pair("fp8 channels", hidden_size=90, intermediate_size=166)
    assert FiberBackend.why_not_narrow(weights.spec).endswith("that 4 divides, not of 90 and 90")
