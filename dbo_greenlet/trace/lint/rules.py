"""The rules, as a table. To add one, write its check and put it here; nothing else knows how many there are."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigurationError
from .batches import EmptyMicrobatches
from .checks import Rule
from .early_events import EarlyEvents
from .environment import OneConnection
from .findings import ERROR, WARNING
from .frees import CrossStreamFrees
from .hazard_checks import hazard_check
from .host_blocks import HostBlocks
from .long_hold import LongHolds
from .messages import SmallMessages
from .order_mismatch import OrderMismatch
from .overlap_share import NoOverlap
from .parked import Parked
from .receives import HooksRun
from .streams import CommOnCompute, UnjoinedStreams

__all__ = ["RULES", "choose_rules"]

_NO_MEMORY = "a profile does not say what kernels read and write"
_NO_HOOKS = "a profile does not show receive hooks"
_NO_STEPS = "a profile does not show the scheduler's steps"

RULES: tuple[Rule, ...] = (
    Rule(
        "event-after-yield",
        WARNING,
        "An event recorded after a yield stands behind the sibling's work, so the stream that waits for it waits for "
        "that too: correct, and without overlap.",
        "record the event before the yield: dbo_yield_and_switch_from_compute_to_comm does, and "
        "dbo_get_previous_event is to be called before it",
        "vLLM #38451",
        EarlyEvents,
    ),
    Rule(
        "comm-on-compute",
        WARNING,
        "A dispatch or combine that occupies the compute stream keeps the other microbatch from computing behind it.",
        "issue it on the comm stream: dbo_yield_and_switch_from_compute_to_comm before it, and back behind it",
        "vLLM #57773",
        CommOnCompute,
    ),
    Rule(
        "unjoined-stream",
        ERROR,
        "What a stream still runs when the step is over is read too early by whoever follows, and no graph can be "
        "captured of it.",
        "let the compute stream wait for an event recorded there: dbo_switch_to_compute_sync, or "
        "dbo_yield_and_switch_from_comm_to_compute",
        "CUDA's rules for capture",
        UnjoinedStreams,
        "a profile does not show where a step ends on a stream",
    ),
    Rule(
        "hook-not-run",
        ERROR,
        "Whatever a send brings is not there until its receive hook has run, and the sender's buffer stays in use.",
        "register the hook with dbo_register_recv_hook before the yield: it then runs exactly once",
        "the contract of DeepEP's hooks",
        HooksRun,
        _NO_HOOKS,
    ),
    Rule(
        "hook-twice",
        ERROR,
        "A receive that runs again waits for a message that never comes, or takes the next one.",
        "call it in one place: leave it to dbo_register_recv_hook",
        "the contract of DeepEP's hooks",
        hazard_check("hook-twice", needs="sends"),
        _NO_HOOKS,
    ),
    Rule(
        "hook-after-use",
        ERROR,
        "What a send brings is read before its receive hook has run, so it is read while it arrives.",
        "run the hook, or let dbo_register_recv_hook run it, before the first use",
        "the contract of DeepEP's hooks",
        hazard_check("receive-before-use", needs="memory"),
        _NO_HOOKS,
    ),
    Rule(
        "race",
        ERROR,
        "Two operations touch the same bytes, one of them writes, and nothing puts one behind the other.",
        "let the later stream wait for an event recorded behind the earlier operation",
        "vLLM #46990",
        hazard_check("race", needs="memory"),
        _NO_MEMORY,
    ),
    Rule(
        "workspace-reused",
        ERROR,
        "A microbatch reads as its own what a sibling has written over since.",
        "give each microbatch a buffer of its own, or use it within one slice",
        "vLLM #46990, #58161",
        hazard_check("workspace-reused", needs="memory"),
        _NO_MEMORY,
    ),
    Rule(
        "cross-stream-free",
        ERROR,
        "Memory that another stream still uses goes back to the allocator, which gives it to the next work of the "
        "stream that made it.",
        "hold it for the other stream: tensor.record_stream(stream), or keep it with the event that ends the use",
        "DeepEP's extra_tensors",
        CrossStreamFrees,
        _NO_MEMORY,
    ),
    Rule(
        "peer-parked-on-error",
        ERROR,
        "A microbatch that is left parked when the step is over holds its memory and its receives, and a step that "
        "waits for it hangs.",
        "let the error pass through every yield: a step fails as a whole, and its siblings are unwound",
        "vLLM #55586",
        Parked,
        _NO_STEPS,
    ),
    Rule(
        "order-mismatch",
        ERROR,
        "Ranks that start their communications in different orders wait for each other forever, or mix their data.",
        "choose by what every rank knows alone: the same policy, seed, vote and split on all of them",
        "vllm-ascend #15062",
        OrderMismatch,
        "profiles are looked at one by one",
    ),
    Rule(
        "cpu-block-before-peer-work",
        WARNING,
        "The host waits for the GPU before the sibling's compute is queued there, so the GPU runs dry.",
        "yield before the communication that makes the host wait, so that the sibling enqueues its compute first",
        "SGLang's prefill (LMSYS)",
        HostBlocks,
        "a profile does not show what the host waits for inside a library",
    ),
    Rule(
        "long-hold",
        WARNING,
        "One microbatch keeps the thread while the GPU has nothing left to run, and no sibling can give it any.",
        "look at what the slice does on the host there: a first compilation, a copy to the host, garbage collection",
        "gevent's MaxSwitchTracer",
        LongHolds,
        _NO_STEPS,
    ),
    Rule(
        "empty-ubatch",
        WARNING,
        "A microbatch without tokens hides nothing, and kernels that take one token a request for granted fail on it.",
        "do not split such a step: raise --dbo-decode-token-threshold, or use a vote that refuses an empty microbatch",
        "SGLang #30238",
        EmptyMicrobatches,
        _NO_STEPS,
    ),
    Rule(
        "max-connections-1",
        WARNING,
        "With one connection the GPU starts kernels in the order of their launches, whichever stream they are on.",
        "unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more",
        "Megatron #2719",
        OneConnection,
        "a profile does not hold the environment",
    ),
    Rule(
        "small-message",
        WARNING,
        "Below some size a message takes as long as a larger one, so that two halves take longer than the whole.",
        "raise --dbo-decode-token-threshold or --dbo-prefill-token-threshold until the halves are above it",
        "vLLM #56126",
        SmallMessages,
    ),
    Rule(
        "no-overlap",
        WARNING,
        "Two microbatches ran and hide next to nothing of their communication: splitting has cost time and won none.",
        "see dbo-greenlet overlap for why there was no compute, or do not split such steps",
        "AFD plugin #336",
        NoOverlap,
    ),
)


def choose_rules(only: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Rule]:
    """The rules of these ids, in the order of the table.

    Args:
        only: ids to take; none takes all.
        ignore: ids to leave out.

    Raises:
        ConfigurationError: an id that no rule has; or no rule is left.
    """
    known = {rule.id for rule in RULES}
    for option, ids in (("--only", only), ("--ignore", ignore)):
        for each in ids:
            if each not in known:
                raise ConfigurationError(
                    f"{option} {each}: no rule has this id; the ids are {', '.join(sorted(known))}"
                )
    chosen = [rule for rule in RULES if (not only or rule.id in only) and rule.id not in ignore]
    if not chosen:
        raise ConfigurationError("--only and --ignore leave no rule; leave one of them out")
    return chosen
