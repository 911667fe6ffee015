"""What the ranks run in the tests of `TorchDistributed`. Each returns what the test has to look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dbo_greenlet.all2all import AllToAll, Dispatch, PaddedTokens
from dbo_greenlet.all2all.torch_distributed import TorchDistributed
from dbo_greenlet.errors import BrokenGroupError
from tests.ranks.rank_pool import group, store_for_tests

Capacity = int | tuple[int, str] | None
"""A capacity, with "static" where the experts are to get rows in a static shape; None for exact messages."""


def transport(name: str, num_experts: int, capacity: Capacity) -> TorchDistributed:
    if isinstance(capacity, tuple):
        return TorchDistributed(group(name), num_experts, capacity[0], static_shapes=True)
    return TorchDistributed(group(name), num_experts, capacity)


def expert(number: int, rows: Tensor) -> Tensor:
    """What expert `number` computes; element by element, so that its bits do not depend on the other rows."""
    return torch.tanh(rows * (number + 1)) + number


def dense_reference(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The obvious way, one token and one choice at a time."""
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        total = torch.zeros(hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for choice, weight in zip(topk_ids[token].tolist(), topk_weights[token], strict=True):
            if choice >= 0:
                total = total + weight * expert(choice, hidden[token]).to(torch.float32)
        out[token] = total.to(hidden.dtype)
    return out


def run_experts(all_to_all: AllToAll, sent: Dispatch) -> Tensor:
    """The outputs of this rank's experts for the rows it received."""
    tokens = sent.tokens()
    if isinstance(tokens, PaddedTokens):
        return padded_experts(all_to_all, tokens)
    blocks = tokens.hidden.split(tokens.counts.tolist())
    first = all_to_all.rank * all_to_all.num_local_experts
    return torch.cat([expert(first + local, rows) for local, rows in enumerate(blocks)])


def padded_experts(all_to_all: AllToAll, tokens: PaddedTokens) -> Tensor:
    """The same for a static shape; what is in places that are not taken is lost."""
    first = all_to_all.rank * all_to_all.num_local_experts
    taken = torch.arange(tokens.hidden.shape[1], device=tokens.hidden.device) < tokens.counts.unsqueeze(1)
    rows = tokens.hidden.masked_fill(~taken.unsqueeze(2), float("nan"))
    return torch.stack([expert(first + local, of_expert) for local, of_expert in enumerate(rows)])


def layer(all_to_all: AllToAll, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """One dispatch and combine, nothing in between."""
    sent = all_to_all.dispatch_send(hidden, topk_ids, topk_weights)
    sent.finish_dispatch()
    sent.combine_send(run_experts(all_to_all, sent))
    sent.finish_combine()
    return sent.combined()


def random_inputs(
    generator: torch.Generator, tokens: int, choices: int, num_experts: int, width: int = 8, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, expert choices (repeats and -1 among them) and weights."""
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    topk_ids = torch.randint(-1, num_experts, (tokens, choices), generator=generator)
    return hidden, topk_ids, torch.rand(tokens, choices, generator=generator)


def generator_of(rank: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + rank)


def all_token_counts(name: str, mode: str, largest: int, choices: list[int]) -> int:
    """All token counts up to `largest` on all ranks; returns how many layers were compared, bit by bit."""
    ranks = group(name)
    compared = 0
    for local_experts in (1, 3):
        capacity: Capacity = {"exact": None, "capacity": largest, "static": (largest, "static")}[mode]
        all_to_all = transport(name, local_experts * ranks.world_size, capacity)
        for counts in itertools.product(range(largest + 1), repeat=ranks.world_size):
            for k in choices:
                inputs = random_inputs(
                    generator_of(ranks.rank, compared), counts[ranks.rank], k, all_to_all.num_experts
                )
                result = layer(all_to_all, *inputs)
                if not torch.equal(result, dense_reference(*inputs)):
                    raise AssertionError(f"tokens {counts}, {k} choices, {local_experts} experts a rank: {inputs}")
                compared += 1
    return compared


def patterns(name: str, capacity: Capacity) -> list[str]:
    """Routings that are all alike; returns those that came out wrong."""
    ranks = group(name)
    world, local = ranks.world_size, 2
    all_to_all = transport(name, world * local, capacity)
    wrong = []
    for label, row in {
        "all to rank 0": [0, 1],
        "all to the last rank": [world * local - 1, world * local - 2],
        "one expert twice": [1, 1],
        "one expert, three times": [2, 2, 2],
        "nobody": [-1, -1],
        "first choice none": [-1, 3],
        "one choice": [3],
        "every expert": list(range(world * local)),
    }.items():
        hidden = torch.randn(4, 8, generator=generator_of(ranks.rank, 7))
        topk_ids = torch.tensor([row] * 4)
        weights = torch.rand(4, len(row), generator=generator_of(ranks.rank, 8))
        if not torch.equal(layer(all_to_all, hidden, topk_ids, weights), dense_reference(hidden, topk_ids, weights)):
            wrong.append(label)
    return wrong


def dtypes(name: str, capacity: Capacity) -> list[str]:
    """Dtypes and odd widths; returns those that came out wrong."""
    all_to_all = transport(name, 4, capacity)
    wrong = []
    for dtype, width in itertools.product((torch.float32, torch.bfloat16, torch.float16), (1, 7, 64)):
        inputs = random_inputs(generator_of(all_to_all.rank, width), 5, 3, 4, width, dtype)
        result = layer(all_to_all, *inputs)
        if result.dtype != dtype or not torch.equal(result, dense_reference(*inputs)):
            wrong.append(f"{dtype} {width}")
    return wrong


def received_order(name: str, capacity: Capacity) -> tuple[list[list[float]], list[int]]:
    """Rows that say where they come from: [rank, token], and the counts. Every token chooses experts 1, 0, 1."""
    all_to_all = transport(name, 4, capacity)
    hidden = torch.tensor([[float(all_to_all.rank), float(token)] for token in range(2)])
    sent = all_to_all.dispatch_send(hidden, torch.tensor([[1, 0, 1]] * 2), torch.ones(2, 3))
    hidden.fill_(-7.0)  # the caller's tensors are free again
    sent.finish_dispatch()
    tokens = sent.tokens()
    result = tokens.hidden.tolist(), tokens.counts.tolist()
    sent.combine_send(tokens.hidden)
    sent.finish_combine()
    return result


def expected_tokens(name: str) -> list[Any]:
    """Bytes sent and rows of an expert, with what is expected and without; what more tokens than that raise."""
    all_to_all = transport(name, 4, (9, "static"))
    inputs = random_inputs(generator_of(all_to_all.rank, 4), 3, 2, 4)
    told: list[Any] = []
    for most in (3, 50, None):
        all_to_all.expect_tokens(most)
        sent = all_to_all.dispatch_send(*inputs)
        sent.finish_dispatch()
        rows = sent.tokens().hidden.shape[1]
        sent.combine_send(run_experts(all_to_all, sent))
        sent.finish_combine()
        told.append((sent.bytes_sent, rows, torch.equal(sent.combined(), dense_reference(*inputs))))
    all_to_all.expect_tokens(2)
    try:
        all_to_all.dispatch_send(*inputs)
    except Exception as error:
        told.append(error)
    return told


def replay_after_a_reset(name: str) -> list[str]:
    """What a replay is told before and after the group was reset."""
    all_to_all, told = transport(name, 4, (4, "static")), []
    all_to_all.begin_capture()
    token = all_to_all.replay_token()
    for _ in range(2):
        try:
            all_to_all.replaying(token)
            told.append("replayed")
        except BrokenGroupError as error:
            told.append(str(error))
        group(name).reset()
    return told


def not_capturable(name: str) -> dict[str, str | None]:
    modes: dict[str, Capacity] = {"exact": None, "capacity": 4, "static": (4, "static")}
    return {mode: transport(name, 4, capacity).not_capturable for mode, capacity in modes.items()}


def company_does_not_matter(name: str, capacity: Capacity) -> bool:
    """A token alone in its microbatch, and among others, has the same bits."""
    all_to_all = transport(name, 6, capacity)
    hidden, topk_ids, weights = random_inputs(generator_of(all_to_all.rank, 3), 9, 4, 6, 33, torch.bfloat16)
    together = layer(all_to_all, hidden, topk_ids, weights)
    alone = [
        layer(all_to_all, hidden[i : i + 1], topk_ids[i : i + 1], weights[i : i + 1]) for i in range(hidden.shape[0])
    ]
    return torch.equal(together, torch.cat(alone))


def parts_of(all_to_all: AllToAll, inputs: tuple[Tensor, Tensor, Tensor]) -> Iterator[Tensor | None]:
    """One microbatch that stops after each of its parts: send, receive, combine send, combine receive (the result)."""
    sent = all_to_all.dispatch_send(*inputs)
    yield None
    sent.finish_dispatch()
    yield None
    sent.combine_send(run_experts(all_to_all, sent))
    yield None
    sent.finish_combine()
    yield sent.combined()


def two_in_flight(name: str, capacity: Capacity) -> list[tuple[int, ...]]:
    """Two microbatches, their parts in each of the 70 possible orders; returns the orders that came out wrong."""
    all_to_all = transport(name, 4, capacity)
    inputs = [random_inputs(generator_of(all_to_all.rank, 50 + i), 3 + 2 * i, 2, 4) for i in range(2)]
    expected = [dense_reference(*of_one) for of_one in inputs]
    wrong = []
    for places in itertools.combinations(range(8), 4):
        microbatches = [parts_of(all_to_all, of_one) for of_one in inputs]
        order = tuple(int(place in places) for place in range(8))
        results: dict[int, Tensor | None] = {}
        for number in order:
            results[number] = next(microbatches[number])
        if not all(torch.equal(results[number], expected[number]) for number in range(2)):
            wrong.append(order)
    return wrong


def send_does_not_wait(name: str, key: str) -> bool:
    """Rank 0 sends and only then lets the others begin; both send parts. A send that waited would never end."""
    ranks = group(name)
    all_to_all = TorchDistributed(ranks, 4, 4)
    store = store_for_tests()
    inputs = random_inputs(generator_of(ranks.rank, 5), 3, 2, 4)

    def in_turn(part: str) -> None:
        if ranks.rank == 0:
            store.set(f"{key}/{part}", "sent")
        else:
            store.wait([f"{key}/{part}"])

    if ranks.rank != 0:
        in_turn("dispatch")
    sent = all_to_all.dispatch_send(*inputs)
    if ranks.rank == 0:
        in_turn("dispatch")
    sent.finish_dispatch()
    outputs = run_experts(all_to_all, sent)
    if ranks.rank != 0:
        in_turn("combine")
    sent.combine_send(outputs)
    if ranks.rank == 0:
        in_turn("combine")
    sent.finish_combine()
    return torch.equal(sent.combined(), dense_reference(*inputs))


def capacity_per_step(name: str) -> list[Any]:
    """A microbatch that is too large, and the same one after the capacity was raised; bytes sent of each step."""
    ranks = group(name)
    all_to_all = TorchDistributed(ranks, 4, 2)
    inputs = random_inputs(generator_of(ranks.rank, 6), 5, 2, 4)
    told: list[Any] = []
    try:
        all_to_all.dispatch_send(*inputs)
    except Exception as error:
        told.append(error)
    largest = int(ranks.exchange([inputs[0].shape[0]]).max())
    all_to_all.capacity = largest
    told.append(torch.equal(layer(all_to_all, *inputs), dense_reference(*inputs)))
    return told


def on_gpus(name: str, capacity: Capacity) -> list[str]:
    """Two microbatches in flight, sent on one stream and received on another; returns what came out wrong."""
    ranks = group(name)
    all_to_all = transport(name, 6, capacity)
    other_stream = torch.cuda.Stream(ranks.device)
    wrong = []
    with torch.cuda.device(ranks.device):
        for dtype, tokens in itertools.product((torch.float32, torch.bfloat16), (0, 1, 9)):
            inputs = [
                tuple(
                    tensor.to(ranks.device)
                    for tensor in random_inputs(
                        generator_of(ranks.rank, 70 + i), tokens * (1 - i * ranks.rank), 3, 6, 64, dtype
                    )
                )
                for i in range(2)
            ]
            sent = [all_to_all.dispatch_send(*of_one) for of_one in inputs]
            with torch.cuda.stream(other_stream):
                for dispatch in sent:
                    dispatch.finish_dispatch()
            for dispatch in sent:
                dispatch.combine_send(run_experts(all_to_all, dispatch))
            with torch.cuda.stream(other_stream):
                for dispatch in sent:
                    dispatch.finish_combine()
            for i, dispatch in enumerate(sent):
                if not torch.equal(dispatch.combined(), dense_reference(*inputs[i])):
                    wrong.append(f"{dtype}, {tokens} tokens, microbatch {i}")
    return wrong


def wait_on_gpu(name: str) -> list[Any]:
    """Receive tokens that rank 1 never sends, twice over: what each try raised."""
    all_to_all = TorchDistributed(group(name), 2, 4)
    told: list[Any] = []
    for _ in range(2):
        try:
            inputs = random_inputs(generator_of(0, 1), 3, 1, 2)
            sent = all_to_all.dispatch_send(*(tensor.to(group(name).device) for tensor in inputs))
            sent.finish_dispatch()
            told.append(sent.tokens())
        except Exception as error:
            told.append(error)
    return told


def bytes_sent(name: str, capacity: Capacity) -> tuple[int, int]:
    """After the dispatch and after the combine: 3 tokens of 8 float32, each for one expert of each of two ranks."""
    all_to_all = transport(name, 2, capacity)
    sent = all_to_all.dispatch_send(torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    after_dispatch = sent.bytes_sent
    sent.finish_dispatch()
    sent.combine_send(sent.tokens().hidden)
    sent.finish_combine()
    return after_dispatch, sent.bytes_sent


def scheduled(name: str, capacity: Capacity, layers: int) -> bool:
    """Two microbatches under the scheduler, their receives run by hooks, against one after the other."""
    from dbo_greenlet.scheduler import Scheduler
    from dbo_greenlet.yields import dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield

    all_to_all = transport(name, 4, capacity)
    inputs = [random_inputs(generator_of(all_to_all.rank, 90 + i), 4 - i, 2, 4) for i in range(2)]

    def microbatch(hidden: Tensor, topk_ids: Tensor, weights: Tensor) -> Tensor:
        for number in range(layers):
            dbo_maybe_run_recv_hook()
            sent = all_to_all.dispatch_send(hidden, topk_ids, weights)
            dbo_register_recv_hook(sent.finish_dispatch)
            dbo_yield(f"layer{number}.dispatch")
            outputs = run_experts(all_to_all, sent)
            dbo_maybe_run_recv_hook()
            sent.combine_send(outputs)
            dbo_register_recv_hook(sent.finish_combine)
            dbo_yield(f"layer{number}.combine")
            hidden = torch.tanh(sent.combined())
        return hidden

    interleaved = Scheduler().run([lambda i=i: microbatch(*inputs[i]) for i in range(2)]).outputs
    for (hidden, topk_ids, weights), output in zip(inputs, interleaved, strict=True):
        for _ in range(layers):
            hidden = torch.tanh(layer(all_to_all, hidden, topk_ids, weights))
        if not torch.equal(hidden, output):
            return False
    return True
