"""The `warpwire` command: the one of the wheel, or `doctor` alone without it."""

import os
import sys

from . import Unavailable, command, doctor


def main() -> int:
    arguments = sys.argv[1:]
    try:
        program = command()
    except Unavailable as missing:
        return _without_command(arguments, missing)
    os.execv(program, ["warpwire", *arguments])


def _without_command(arguments: list[str], missing: Unavailable) -> int:
    match arguments:
        case ["doctor"] | ["doctor", "--json"]:
            text, usable = doctor(json="--json" in arguments)
            print(text)
            return 0 if usable else 1
    print(f"{missing}; without it there is only: doctor [--json]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
