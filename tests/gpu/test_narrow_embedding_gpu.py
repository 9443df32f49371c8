"""A narrow embedding on a GPU: bit for bit what its values are as 16 bits."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.embedding import Embedding, narrow_table
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.triton import TritonBackend
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.embedding import embedding_row
from tests.lib.narrow_embedding import CASES, HALF, lanes_of, pair

pytestmark = pytest.mark.gpu
BACKENDS = {"cuda": CudaBackend, "triton": TritonBackend}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("case", CASES)
def test_rows_in_a_graph_are_those_of_16_bits(case):
    narrow, wide = pair(case)
    table = narrow_table(narrow.narrow("embed", torch.Tensor.cuda), narrow.spec)
    embedding = Embedding(table, HALF[narrow.spec.dtype], embedding_row(narrow.spec))
    ids, graph = torch.zeros(5, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    embedding.rows(ids)
    with torch.cuda.graph(graph):
        found = embedding.rows(ids)
    ids.copy_(torch.tensor([0, 1, 42, 99, 100]))
    graph.replay()
    assert found.cpu().equal(wide.load("embed")[ids.cpu()].float())


def run(backend, slots):
    mailbox = Mailbox()
    for slot in range(slots):
        mailbox.post(Request(slot, (3 + slot, 42, 7, 9, 30), GREEDY, seed=0, max_tokens=4))
    backend.generate(mailbox)
    return [[step.token for step in mailbox.read(slot, 0)] for slot in range(slots)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_have_the_values_of_their_rows(case, name):
    """By a stage alone, by requests alone and together, and by a prompt of either kind."""
    told = []
    for weights in pair(case):
        said = []
        for prefill, slots in (("kernel", 1), ("library", 2)):
            options = BackendOptions(device="nvidia", num_slots=slots, max_context=64, prefill=prefill)
            backend = BACKENDS[name](weights, options)
            given = {"token_ids": torch.tensor([0, 1, 42, 99, 100])}
            said.append((backend.run_stage("embed", 0, given)["x"].cpu().tolist(), run(backend, slots)))
            backend.close()
        told.append(said)
    assert told[0] == told[1] and all(len(set(map(tuple, x[0]))) == 5 for x, _ in told[0])


def test_lanes_begin_with_one_row():
    told = []
    for weights in lanes_of("fp8 blocks"):
        backend = CudaBackend(weights, BackendOptions(device="nvidia", max_context=64))
        told.append(run(backend, 1))
        backend.close()
    assert told[0] == told[1]
