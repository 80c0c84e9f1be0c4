"""Drafts for tests: some of them right, and others wrong, at places that the tests know.

And it has vLLM on CPUs decode with drafts over states, which it can do on GPUs only. There are stand-ins for
two of vLLM's kernels, with the same arguments, and for a short convolution of several tokens of a request,
which gated delta nets do not need. A convolution keeps a window of tokens for all drafts in one block. With
`columns` it keeps what is behind each draft in a block of its own, as recurrent layers do.
"""

import ctypes
import inspect
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

# Prompts with what is said to them. Drafts are taken from here.
_known: list[list[int]] = []


def draft_what_is_known() -> None:
    """Puts drafts from `know` in the place of n-grams, and has vLLM take no other tokens for drafts."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    names = list(inspect.signature(NgramProposer.propose).parameters)

    def propose(self: Any, *given: Any, **named: Any) -> list[list[int]]:
        step = SimpleNamespace(**dict(zip(names[1:], given, strict=False)), **named)
        known = [
            step.token_ids_cpu[row, :count].tolist() for row, count in enumerate(step.num_tokens_no_spec)
        ]
        news = step.sampled_token_ids
        return [
            drafts_behind(tokens, self.k) if new else [] for tokens, new in zip(known, news, strict=False)
        ]

    NgramProposer.propose = propose
    split = Scheduler._mamba_block_aligned_split

    def split_with_care(self: Any, request: Any, tokens: int, *more: Any) -> int:
        """Avoids steps that the V1 model runner gets wrong (see `Stores.loses_state`): the last few tokens of
        a preempted request come one by one, and a prompt's last token has no drafts beside other requests.
        """
        count: int = split(self, request, tokens, *more)
        first = request.num_computed_tokens + sum(more)
        if more and first == request.num_tokens - 1 and self.running:
            return 1
        begins_anew = request.num_prompt_tokens <= first < request.num_tokens - 1
        return 1 if begins_anew and count <= 1 + self.num_spec_tokens else count

    Scheduler._mamba_block_aligned_split = split_with_care


def know(sequences: Sequence[list[int]]) -> None:
    """Drafts are as in these from now on."""
    _known[:] = sequences


def drafts_behind(tokens: list[int], count: int) -> list[int]:
    """What comes next: first right tokens, more or fewer of them, then wrong ones."""
    found = next((one for one in _known if one[: len(tokens)] == tokens), [])
    right = random.Random(len(tokens)).randrange(count + 1)
    drafts = found[len(tokens) : len(tokens) + count]
    return [*drafts[:right], *(token ^ 1 for token in drafts[right:])]


def spoil_some_drafts() -> None:
    """Has a drafter that is always right give fewer right tokens, or none, and then wrong ones."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    propose = SpecDecodeBaseProposer.propose

    def propose_wrong_ones(self: Any, *given: Any, **named: Any) -> Any:
        import torch

        drafts = propose(self, *given, **named)
        right = drafts[:, :1] % (drafts.shape[1] + 1)
        wrong = torch.arange(drafts.shape[1], device=drafts.device) >= right
        return torch.where(wrong, drafts ^ 1, drafts)

    SpecDecodeBaseProposer.propose = propose_wrong_ones


def draft_over_states(columns: bool) -> None:
    """Puts the stand-ins in place, before the model is made."""
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba import mamba_utils as kinds
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.model_executor.models.lfm2 import Lfm2ForCausalLM
    from vllm.v1.worker import mamba_utils

    for name, run in (("postprocess_mamba_fused", postprocess), ("precopy_mamba_align_fused", precopy)):
        setattr(mamba_utils, f"{name}_kernel", Kernel(getattr(mamba_utils, f"{name}_kernel"), run))
    if columns:
        copies = Lfm2ForCausalLM.get_mamba_state_copy_funcs
        Lfm2ForCausalLM.get_mamba_state_copy_funcs = classmethod(
            lambda _, *more: {kind: (kinds.get_temporal_copy_spec,) for kind in copies(*more)}
        )
    forward, update = ShortConv.forward_native, causal_conv1d.causal_conv1d_update_cpu
    step: Any = None

    def forward_with_drafts(self: Any, hidden_states: Any, output: Any) -> Any:
        nonlocal step
        steps = get_forward_context().attn_metadata
        step = steps[self.prefix] if steps is not None else None
        return forward(self, hidden_states, output)

    def update_with_drafts(x: Any, conv_state: Any, weight: Any, bias: Any = None, **more: Any) -> Any:
        if step is None or step.num_accepted_tokens is None:  # or of a gated delta net
            return update(x, conv_state, weight, bias, **more)
        out, before = torch.empty_like(x), weight.shape[1] - 1
        starts = step.query_start_loc_d.tolist()
        for number, accepted in enumerate(step.num_accepted_tokens.tolist()):
            first, last = starts[number], starts[number + 1]
            blocks = step.state_indices_tensor_d[number].tolist()
            window = conv_state[blocks[accepted - 1]] if columns else conv_state[blocks[0]][:, accepted - 1 :]
            seen = torch.cat([window[:, :before], x[first:last].T], dim=1)
            convolved = torch.nn.functional.conv1d(seen[None], weight[:, None], bias, groups=len(weight))
            out[first:last] = convolved[0].T
            if columns:
                for draft in range(last - first):
                    conv_state[blocks[draft]][:, :before] = seen[:, draft + 1 : draft + 1 + before]
            else:
                conv_state[blocks[0]][:, : seen.shape[1] - 1] = seen[:, 1:]
        return out

    ShortConv.forward_native = forward_with_drafts
    causal_conv1d.causal_conv1d_update_cpu = update_with_drafts


class Kernel:
    """Stands in for a kernel: `kernel[grid](...)` calls `run` with its arguments, by their names."""

    def __init__(self, kernel: Any, run: Callable[[Any], None]) -> None:
        self.names = list(inspect.signature(getattr(kernel, "func", kernel)).parameters)
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self.run(
            SimpleNamespace(**dict(zip(self.names, given, strict=False)), **named)
        )


def postprocess(given: Any) -> None:
    """Copies the state at the last end of a block that a request has reached into that block."""
    for row in range(given.num_reqs):
        accepted = int(given.num_accepted_tokens_ptr[row])
        running = int(
            given.num_computed_tokens_ptr[row]
            + given.num_scheduled_tokens_ptr[row]
            - given.num_draft_tokens_ptr[row]
        )
        end = (running + accepted - 1) // given.block_size * given.block_size
        if end < running:
            continue
        source, target = int(given.mamba_state_idx_ptr[row]), end // given.block_size - 1
        if source == target:
            given.num_accepted_tokens_out_ptr[row] = 1
        copy_states(given, row, source, target, end - running)


def precopy(given: Any) -> None:
    """Copies the states of the last step's block into this step's block."""
    for row in range(given.num_reqs):
        source, target = int(given.src_col_ptr[row]), int(given.mamba_state_idx_ptr[row])
        if source >= 0 and source != target:
            copy_states(given, row, source, target, int(given.token_bias_ptr[row]))


def copy_states(given: Any, row: int, source: int, target: int, tokens: int) -> None:
    """Copies what is behind so many drafts from one place of a request's table to another one."""
    for state in range(len(given.state_base_addrs_ptr)):
        group = int(given.state_group_indices_ptr[state])
        table = (ctypes.c_int32 * (max(source + tokens, target) + 1)).from_address(
            int(given.block_table_ptrs_ptr[group]) + 4 * row * given.block_table_stride_req
        )
        start, stride = int(given.state_base_addrs_ptr[state]), int(given.state_block_strides_ptr[state])
        inner = int(given.state_inner_sizes_ptr[state] * given.state_elem_sizes_ptr[state])
        width = int(given.state_conv_widths_ptr[state])
        to = start + stride * table[target]
        if width:
            ctypes.memmove(to, start + stride * table[source] + tokens * inner, (width - tokens) * inner)
        else:
            ctypes.memmove(to, start + stride * table[source + tokens], inner)
