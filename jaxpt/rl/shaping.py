"""What is added to an episode's reward for its length; in tokens."""


def soft_overlong(length: int, *, limit: int, buffer: int) -> float:
    """DAPO: 0 up to limit - buffer, falling to -1 at the limit (arXiv:2503.14476, eq. 13).

    limit: the most tokens that a completion may have; buffer: of these, the punished last.

    Raises:
      ValueError: the buffer is not between 1 and the limit, so nothing or everything would
        be punished.
    """
    if not 1 <= buffer <= limit:
        raise ValueError(
            f"soft_overlong: buffer={buffer} must lie between 1 and limit={limit} tokens."
        )
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)
