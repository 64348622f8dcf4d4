"""Namespaces of models that nobody runs, for what is measured without one."""

from kvcellar.identity import BlockHash, Group, Layer, Namespace, ParallelStrategy

BLOCK_TOKENS = 16


def bench_namespace(
    layers: int, block_bytes: int, chunk_tokens: int, *, tp: int = 1, checksum: str = "xxh3-64"
) -> Namespace:
    """One group of alike layers."""
    group = Group(BLOCK_TOKENS, tuple(Layer(f"layers.{number}", block_bytes) for number in range(layers)))
    return Namespace(
        engine="bench",
        model="none",
        weights="none",
        kv_dtype="uint8",
        kv_layout="none",
        groups=(group,),
        parallel=ParallelStrategy(tp=tp),
        chunk_tokens=chunk_tokens,
        block_hash=BlockHash("none", BLOCK_TOKENS, ""),
        checksum=checksum,
    )
