#!/usr/bin/env python
"""Converts a checkpoint: GGUF or a Hugging Face folder in, a Hugging Face folder out.

    scripts/convert.py --source model.gguf --target model/

Quantized weights come out in float32, as they are used. Exit code 2 means that the
input can't be converted as it is: one line says why and what to do.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    from jaxpt.convert.export import export
    from jaxpt.convert.load import open_checkpoint

    start = time.monotonic()
    try:
        checkpoint = open_checkpoint(args.source)
        written = export(
            args.target,
            family=checkpoint.family,
            config=checkpoint.config,
            leaves=checkpoint.leaves(),
            tokenizer=checkpoint.tokenizer,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start
    print(
        f"{len(checkpoint.source.shapes)} tensors of the {checkpoint.family.name} "
        f"family: {checkpoint.num_bytes / 1e6:.1f} MB read, {written / 1e6:.1f} MB "
        f"written to {args.target} in {seconds:.1f} s "
        f"({written / 1e6 / seconds:.0f} MB/s)."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
