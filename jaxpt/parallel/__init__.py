"""What runs under `shard_map`: collectives written by hand, each taking an axis name."""
