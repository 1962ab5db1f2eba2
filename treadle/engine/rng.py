"""Counter-based RNG: random bits from a key and a position, without state.

Owns the arithmetic from (seed, task, sample, row, attempt, position) to well-mixed bits. Holds no state, so the order
of draws changes nothing, and every process and device draws the same. `native/sampler.py` has the same function for
tensors, `native/fused_sampler.py` for Triton.
"""

from hashlib import blake2b

from treadle.types import Request

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def stream_of(request: Request, *salt: object) -> int:
    """64 bits for one row of one attempt: the same for all its requests, and no other row's."""
    sample = f"{request.sample}"
    if request.row or request.attempt:
        sample = f"{sample}.{request.row}.{request.attempt}"
    key = f"{request.sampling.seed}\0{request.uid}\0{sample}\0{salt}"
    return int.from_bytes(blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def bits_at(stream: int, position: int) -> int:
    """64 well-mixed bits for one position of a stream."""
    bits = (stream + (position + 1) * _STEP) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31


def unit_at(stream: int, position: int) -> float:
    """A number in [0, 1) for one position of a stream."""
    return (bits_at(stream, position) >> 11) * 2.0**-53
