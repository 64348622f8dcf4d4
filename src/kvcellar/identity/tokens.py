"""Token arithmetic: which blocks and chunks a run of tokens covers, what a hit needs, what a request loads.

Everything is counted in tokens; blocks and chunks are derived from tokens, never from each other. (Under
vLLM's hybrid allocator the engine's "block size" is only the GCD of its groups, so dividing by it goes wrong
as soon as it is forgotten.) Pure; knows nothing of the index or of leases.
"""

from collections.abc import Callable, Sequence

from kvcellar.errors import BadRequest
from kvcellar.identity.namespace import Group


def block_range(start: int, stop: int, block_tokens: int) -> range:
    """The blocks of one group that hold tokens [start, stop)."""
    if start < 0 or stop < start or start % block_tokens or stop % block_tokens:
        raise BadRequest(f"tokens [{start}, {stop}) are not aligned to blocks of {block_tokens}")
    return range(start // block_tokens, stop // block_tokens)


def window_chunks(group: Group, chunk_tokens: int) -> int | None:
    """How many chunks before the end of a hit a group needs; None means all of them.

    A token attends to the window - 1 tokens before it, and a hit's last token may have to be computed again,
    see loadable_tokens. A recurrent state needs only the newest.
    """
    if group.kind == "recurrent":
        return 1
    if group.window_tokens is None:
        return None
    return -(-group.window_tokens // chunk_tokens)


def fold_windows(chunks: int, windows: Sequence[int | None], present: Callable[[int, int], bool]) -> int:
    """The longest hit, in chunks, that every group can serve.

    present(group, chunk) answers for chunk < chunks. Groups without a window need everything before the hit's
    end.
    """
    hit = chunks
    for group, window in enumerate(windows):
        if window is None:
            hit = next((chunk for chunk in range(hit) if not present(group, chunk)), hit)
    low = [hit] * len(windows)  # of each group: chunks [low, hit) are there, and are not asked for again
    settled = False
    while hit and not settled:
        settled = True
        for group, window in enumerate(windows):
            if window is None:
                continue
            need, at = max(hit - window, 0), min(low[group], hit)
            while at > need and present(group, at - 1):
                at -= 1
            if at > need:  # A gap spoils every hit that ends in the window behind it: go on from the gap.
                hit, settled = at - 1, False
            low[group] = at
    return hit


def needed_chunks(hit: int, window: int | None) -> range:
    """The chunks of one group that a hit of `hit` chunks reads."""
    return range(0 if window is None else max(0, hit - window), hit)


def loadable_tokens(engine_hit: int, cache_hit: int, prompt_tokens: int, block_tokens: int) -> int:
    """What a request gains by its hit, beyond what the engine has.

    The last token of a prompt is computed in any case, for its answer. So a hit of the whole prompt is taken
    but for that token, and the last block, which it is written to, is loaded none the less. A hit that gains
    less than a block is not taken: computing the rest of a block costs nothing beside that token. A recurrent
    state cannot go back by a token: who has one looks up (prompt_tokens - 1) // chunk_tokens chunks.
    """
    usable = min(cache_hit, prompt_tokens - 1)
    return usable - engine_hit if usable // block_tokens * block_tokens > engine_hit else 0


def loaded_chunks(engine_hit: int, new_tokens: int, chunk_tokens: int) -> range:
    """The chunks of a hit that a request reads for these tokens; what is before and behind goes back at once.

    tokens   0 ....... first chunk ............. engine_hit ................ engine_hit + new_tokens
             | given back | the engine has it: skipped | copied to its blocks |
    """
    return range(engine_hit // chunk_tokens, -(-(engine_hit + new_tokens) // chunk_tokens))
